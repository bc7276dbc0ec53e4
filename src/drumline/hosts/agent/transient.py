"""Errors of a set-up that pass by themselves within minutes, by their text. No I/O.

A fresh VM updates itself while the first set-up runs, and its network and its accounts may not be
ready. The agent repeats such a step, and `drumline explain --log` names the reason.
"""

from __future__ import annotations

import re

LAST_LINES = 20
"""The lines at the end of a step's output that can show why it failed."""

TRANSIENT_ERRORS = (
    (
        # Without the rights of root, no wait helps.
        r"(?s:\A(?!.*(?:lock file[^\n]*Permission denied|are you root)).*?)"
        r"(?:Could not get lock /var/lib/(?:dpkg|apt)|Could not get lock /var/cache/apt"
        r"|Unable to acquire the dpkg frontend lock|Unable to lock (?:the )?(?:directory|administ)"
        r"|dpkg frontend lock (?:was|is) locked|is another process using it\?"
        r"|Waiting for cache lock)",
        "another process, usually the VM's own update, holds the lock of apt",
    ),
    (
        r"snap[^\n]*(?:has|have) \"?[\w-]+\"? change in progress|change in progress"
        r"|too early for operation, device not yet seeded|device not yet seeded"
        r"|system does not fully support snapd|cannot communicate with server: [^\n]*snapd"
        r"|snapd[^\n]*(?:not (?:running|ready|available)|connection refused)"
        r"|snap-confine has elevated permissions|(?:gcloud|gsutil): command not found"
        r"|/snap/bin/\S+: No such file",
        "snap, and with it gcloud, is not ready yet",
    ),
    (
        r"Cannot connect to the Docker daemon|Is the docker daemon running"
        r"|docker\.sock: connect: (?:no such file|connection refused)",
        "docker is not ready yet",
    ),
    (
        r"docker-credential-gc(?:loud|r)[^\n]*(?:exit status|not found|no such file)"
        r"|error getting credentials - err|net/http: TLS handshake timeout"
        r"|You do not currently have an active account selected"
        r"|metadata(?:\.google\.internal| server)[^\n]*(?:timed? ?out|refused|unavailable|50[0234])"
        r"|toomanyrequests|registry[^\n]*(?:50[0234]|service unavailable)",
        "the login to the registry is not ready yet",
    ),
    (
        r"Temporary failure (?:in name resolution|resolving)|Could not resolve host"
        r"|dns error|failed to lookup address information"
        r"|EAI_AGAIN|Resolving timed out",
        "names cannot be resolved at the moment",
    ),
    (
        r"\b(?:HTTP(?:/[\d.]+)?(?: error)?|status(?: code)?|returned error|Server Error)"
        r"[ :(]*(?:429|50[0234])\b"
        r"|\berror[ :(]*(?:429|50[0234])(?::|[ ,-]+(?:Too Many|Internal|Bad|Service|Gateway)\b)"
        r"|\b50[0234]\s+(?:Server Error|Internal Server Error|Bad Gateway"
        r"|Service (?:Temporarily )?Unavailable|Gateway Time-?out)|\b429 Too Many Requests"
        r"|(?:connection|read|operation|request) timed out|ReadTimeoutError|ConnectTimeoutError"
        r"|(?:curl|wget|pip|git|Recv failure|unable to access|connection broken)"
        r"[^\n]*Connection (?:reset by peer|aborted)|Remote end closed connection"
        r"|Network is unreachable|TLS connection was non-properly terminated"
        r"|CondaHTTPError|Hash Sum mismatch|File has unexpected size"
        r"|dial tcp[^\n]*(?:i/o timeout|server misbehaving|connection (?:refused|reset))"
        r"|Client\.Timeout exceeded|request canceled while waiting for connection"
        r"|tcp connect error|Could not connect to [\w.-]+:\d+ \("
        r"|RPC failed; curl \d+|fatal: early EOF|disconnect while reading sideband packet"
        r"|kex_exchange_identification: [^\n]*(?:closed|reset)",
        "a server of packages does not answer at the moment",
    ),
)
"""Patterns with the reason in words."""


def find_transient_error(output: str) -> str:
    """Return the reason if the last lines show an error that passes; empty if they do not."""
    last_lines = "\n".join(output.splitlines()[-LAST_LINES:])
    for pattern, reason in TRANSIENT_ERRORS:
        if re.search(pattern, last_lines, re.IGNORECASE):
            return reason
    return ""
