"""Stage 7: views of records. Reads Run, Result, Profile, Finding; writes no record. Imports neither torch nor a stage.

``text`` is the terminal's table, ``html`` the self-contained page (its charts are in ``charts``), ``notebook`` the view
a run shows of itself in Jupyter; ``words`` holds the sentences and cells that all three share.
"""
