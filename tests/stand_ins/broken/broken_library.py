"""A library whose shared object does not load."""

raise ImportError("libcudart.so.12: cannot open shared object file\nand a second line")
