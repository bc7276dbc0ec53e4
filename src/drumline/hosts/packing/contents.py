"""Recognises secrets by the content of a file.

A header alone is not a key, because source code and documentation mention it. It counts if key data
follows it. The file is scanned in blocks while it is read, so a large file is never in memory.
"""

import base64
import binascii
import json
import re
from collections.abc import Sequence
from typing import Any

from drumline.hosts.packing.names import CLOUD, KEY, PASSWORDS, TOKEN, is_settings

SERVICE_ACCOUNT = "service-account key"
OVERLAP = 1 << 14
"""The bytes of a block that are scanned again with the next block. They are enough for the header
of a key and the beginning of its data."""
HEAD = 1 << 20
"""The bytes of the beginning that are kept, for formats that are parsed."""

# The characters between the lines of a key: line ends, also escaped as in JSON, and the quotes,
# indents and comment marks of the surrounding file.
_BREAK = rb"(?:\s|\\+[rnt]|\\u000[adAD]|&#1[03];|%0[aAdD]|//|<br ?/?>|[\"'`,+(){}\[\]>|#*;:\\])"
_HEADERS = (
    rb"(?:(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset|MessageID|Subject|Key-ID)"
    rb":[^\r\n\\]{0,200}+"
    + _BREAK
    + rb"{1,200}+){0,12}+"
)  # fmt: skip
_BASE64 = (
    rb"(?:[A-Za-z0-9+/]{32,}|(?:[A-Za-z0-9+/]{12,}={0,2}"
    + _BREAK
    + rb"{1,80}+){2}[A-Za-z0-9+/]{8,})"
)  # fmt: skip
_PEM = re.compile(
    rb"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}"
    + _BREAK
    + rb"{0,200}+"
    + _HEADERS
    + _BASE64
)
_PEM_IN_BASE64 = {b"LS0tLS1CRUdJTi": 0, b"0tLS0tQkVHSU4g": 2, b"tLS0tLUJFR0lOI": 3}
"""The header of a key in base64, with the number of preceding characters of its group."""
_AGE = re.compile(rb"AGE-SECRET-KEY-1[0-9A-Z]{58}", re.IGNORECASE)
_PUTTY = re.compile(rb"Private-Lines: *\d+\s+[A-Za-z0-9+/]{16}")
_GPG_AGENT = re.compile(rb"(?:^|Key: *)\((?:\d+:)?(?:protected-|shadowed-)?private-key", re.M)
_WIREGUARD = re.compile(rb"^[ \t]*PrivateKey[ \t]*=[ \t]*[A-Za-z0-9+/]{42,43}=", re.M)
_MINISIGN = re.compile(rb"untrusted comment:[^\n]*secret key\s*\n[A-Za-z0-9+/]{40}")
_SSH1 = b"SSH PRIVATE KEY FILE FORMAT 1."
_JAVA = (b"\xfe\xed\xfe\xed\0\0\0", b"\xce\xce\xce\xce\0\0\0")
_PKCS12 = re.compile(
    rb"\x30(?:[\x00-\x7f]|[\x80-\x84].{0,4})\x02\x01\x03\x30.{1,6}\x06\x09"
    rb"\x2a\x86\x48\x86\xf7\x0d\x01\x07[\x01\x02]",
    re.S,
)
_DER = (
    # PKCS#8, with any algorithm; the same encrypted; RSA; EC.
    re.compile(rb"\x30(?:[\x00-\x7f]|\x81.|\x82..)\x02\x01[\x00\x01]\x30.\x06.{5,40}\x04", re.S),
    re.compile(rb"\x30(?:\x81.|\x82..)\x30.\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x05", re.S),
    re.compile(rb"\x30\x82..\x02\x01\x00\x02\x82..\x00", re.S),
    re.compile(rb"\x30(?:[\x00-\x7f]|\x81.)\x02\x01\x01\x04[\x14-\x42]", re.S),
)
_SETTING = re.compile(
    rb"(?:_authToken|_auth|authToken|npmAuth\w*|_password|password|passwd|token|secret)"
    rb"[\"']?[ \t]*[=:][ \t]*[\"']?(?!\$\{|%\()[^\s\"']"
    rb"|://[^/\s:@]*:(?!\$\{)[^/\s@]+@",
    re.IGNORECASE,
)
_TOKEN = (
    rb"(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}|glpat-[\w-]{20,}"
    rb"|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|xox[abeprs]-[\w-]{20,}|sk-[\w-]{32,}"
    rb"|AIza[\w-]{35}|ya29\.[\w-]{20,})"
)
"""A token of Hugging Face, GitHub, GitLab, npm, PyPI, Slack, OpenAI, Anthropic or Google."""
_ONLY_A_TOKEN = re.compile(rb"\s*+" + _TOKEN + rb"\s*+")
_TOKEN_IN_URL = re.compile(rb"://" + _TOKEN + rb"(?::[^/\s@]*)?@")
_URL_LOGIN = re.compile(rb"\s*https?://[^/\s:@]+:[^/\s@]+@\S")
_NETRC = re.compile(rb"^[ \t]*machine\s+\S+\s+(?:login\s+\S+\s+)?password\s+\S", re.M)
_AWS = re.compile(
    rb"^[ \t]*(?:export[ \t]+)?aws_secret_access_key[ \t]*[=:][ \t]*[\"']?[A-Za-z0-9/+]{30,}"
    rb"|^(?:[^\n,]*,)?Access key ID,Secret access key",
    re.M | re.IGNORECASE,
)
_BOTO = re.compile(rb"^[ \t]*gs_(?:oauth2_refresh_token|secret_access_key)[ \t]*=[ \t]*\S", re.M)
_KUBECONFIG = re.compile(
    rb"(?:^|[{,])[ \t-]*[\"']?(?:client-key-data|token|password)[\"']?:[ \t]*\S{8}", re.M
)
_KIND_CONFIG = re.compile(rb"\bkind[\"']?:[ \t]*[\"']?Config\b")


class SecretScan:
    """Scans a file block by block for secrets."""

    def __init__(self, components: Sequence[str]) -> None:
        """`components` is the path of the file, because some settings are secret in some files."""
        self._components = components
        self._overlap = b""
        self._head = bytearray()
        self._size = 0
        self._found_key = False
        self._markers: set[bytes] = set()

    def feed(self, block: bytes) -> None:
        """Scan the next block."""
        self._size += len(block)
        if len(self._head) < HEAD:
            self._head += block[: HEAD - len(self._head)]
        window = self._overlap + block
        self._found_key = self._found_key or _has_key(window)
        for marker in (b"service_account", b"private_key"):
            if marker in window:
                self._markers.add(marker)
        self._overlap = window[-OVERLAP:]

    def reason(self) -> str | None:
        """Return the reason why the file is secret, or None, once all blocks were scanned."""
        head = bytes(self._head)
        parsed = self._parse_json(head)
        if isinstance(parsed, dict) and (reason := _json_reason(parsed)):
            return reason
        if self._found_key:
            return SERVICE_ACCOUNT if len(self._markers) == 2 else KEY
        if _is_binary_key(head):
            return KEY
        if is_settings(self._components) and (
            _SETTING.search(_text(head)) or _TOKEN_IN_URL.search(_text(head))
        ):
            return "settings with a token or password"
        return _text_reason(_text(head)) if self._size <= HEAD else None

    def _parse_json(self, head: bytes) -> Any:
        if self._size > HEAD or not _text(head).lstrip().startswith(b"{"):
            return None
        try:
            return json.loads(_text(head))
        except (ValueError, RecursionError):
            return None


def _text(data: bytes) -> bytes:
    """Return ASCII text without the zero bytes of UTF-16 and without byte order marks."""
    return data.replace(b"\0", b"").removeprefix(b"\xff\xfe").removeprefix(b"\xef\xbb\xbf")


def _has_key(data: bytes) -> bool:
    if b"P\0R\0I\0V\0A\0T\0E" in data or b"A\0G\0E\0-\0S" in data:
        data += b"\n" + data.replace(b"\0", b"")
    if b"PRIVATE KEY" in data and (_PEM.search(data) or _SSH1 in data[:64]):
        return True
    if b"PuTTY-User-Key-File-" in data and _PUTTY.search(data):
        return True
    if b"private-key" in data and _GPG_AGENT.search(data):
        return True
    if b"PrivateKey" in data and _WIREGUARD.search(data):
        return True
    if b"secret key" in data and _MINISIGN.search(data):
        return True
    if (b"AGE-SECRET-KEY-1" in data or b"age-secret-key-1" in data) and _AGE.search(data):
        return True
    return any(
        _is_pem_in_base64(data[match.start() : match.start() + 400], offset)
        for header, offset in _PEM_IN_BASE64.items()
        for match in re.finditer(re.escape(header), data)
    )


def _is_pem_in_base64(encoded: bytes, offset: int) -> bool:
    characters = re.match(rb"[A-Za-z0-9+/\s]*", encoded)
    joined = b"A" * offset + b"".join((characters[0] if characters else b"").split())
    try:
        decoded = base64.b64decode(joined[: len(joined) // 4 * 4])
    except (binascii.Error, ValueError):
        return False
    return _PEM.search(decoded) is not None


def _is_binary_key(head: bytes) -> bool:
    if head.startswith(_JAVA) or head.startswith(_SSH1):
        return True
    if head[:1] == b"\x30":
        return bool(_PKCS12.match(head)) or any(form.match(head) for form in _DER)
    # OpenPGP: a secret-key packet (tag 5) of version 3 to 6, in the old and the new format.
    lengths = {0x94: 1, 0x95: 2, 0x96: 4}
    if head[:1] == b"\xc5" and len(head) > 8:
        body = 2 if head[1] < 192 else 3 if head[1] < 224 else 6
        return _is_pgp_key(head[body:])
    return bool(head) and head[0] in lengths and _is_pgp_key(head[1 + lengths[head[0]] :])


def _is_pgp_key(packet: bytes) -> bool:
    """Return True if version and algorithm are those of a key."""
    return len(packet) > 6 and packet[0] in (4, 5, 6) and packet[5] in range(1, 29)


def _json_reason(parsed: dict[Any, Any]) -> str | None:
    credential_type = parsed.get("type")
    if credential_type == "service_account" and parsed.get("private_key"):
        return SERVICE_ACCOUNT
    if parsed.get("refresh_token") and (
        parsed.get("client_secret") or credential_type == "authorized_user"
    ):
        return CLOUD
    if any(isinstance(v, dict) and v.get("client_secret") for v in parsed.values()):
        return CLOUD
    keys = parsed["keys"] if isinstance(parsed.get("keys"), list) else [parsed]
    if any(
        isinstance(key, dict) and key.get("kty") and (key.get("d") or key.get("k")) for key in keys
    ):
        return KEY
    auths = parsed.get("auths")
    if isinstance(auths, dict) and any(auth for auth in auths.values() if isinstance(auth, dict)):
        return "registry credentials"
    return None


def _text_reason(text: bytes) -> str | None:
    """Return the reason if the file consists of credentials, or None."""
    if _ONLY_A_TOKEN.fullmatch(text):
        return TOKEN
    if _URL_LOGIN.match(text) or _NETRC.search(text):
        return PASSWORDS
    if _AWS.search(text) or _BOTO.search(text):
        return CLOUD
    if _KIND_CONFIG.search(text) and b"clusters" in text and _KUBECONFIG.search(text):
        return CLOUD
    return None
