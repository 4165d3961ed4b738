"""Stage 1, since stages 2 and 5 use it: what a secret looks like, by the name of its variable or by itself. Pure."""

from __future__ import annotations

import re

SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|JWT|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|(^|_)(AUTH|PAT|KEY)(_|$)|_PWD$",
    re.I,
)
# An address with a password in it; tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Google and Slack; what a
# header carries; a private key.
SECRET_VALUE = re.compile(
    r"://[^/\s@]*:[^/\s@]*@|\bhf_[A-Za-z0-9]{16,}|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[\w-]{20,}|\bA[KS]IA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bxox[abeoprs]-[\w-]{10,}|\bBearer [\w.~+/-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
