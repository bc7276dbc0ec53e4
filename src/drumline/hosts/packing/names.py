"""Files and folders that are secret by their names.

A name is compared without regard to case, to compatibility forms of Unicode and to the endings of
backups. Names decide after contents: a private key is recognised whatever its name.
"""

import re
import unicodedata
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache

_END = r"\Z"
KEY = "private key"
ENVIRONMENT = "environment file"
PASSWORDS = "password file"
CLOUD = "cloud credentials"
TOKEN = "access token"  # noqa: S105
TERRAFORM = "Terraform state or variables"

_FOLDERS: dict[tuple[str, ...], str] = {
    (".ssh",): "SSH folder",
    (".gnupg",): "GnuPG folder",
    (".password-store",): PASSWORDS,
    (".env",): ENVIRONMENT,
    (".aws",): CLOUD,
    (".azure",): CLOUD,
    (".kube",): CLOUD,
    (".config", "gcloud"): CLOUD,
    ("legacy_credentials",): CLOUD,
    (".kaggle",): TOKEN,
    (".config", "gh"): TOKEN,
    (".config", "rclone"): CLOUD,
    (".terraform.d",): TERRAFORM,
}
"""Folders of which nothing is sent, by the last components of their path."""

_FILES: dict[str, str] = {
    **dict.fromkeys(
        (
            "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", "id_xmss",
            "google_compute_engine", "ssh_host_*_key", "secring.gpg", "*.ppk", "*.p12", "*.pfx",
            "*.jks", "*.jceks", "*.keystore", "*.pk8", "*.key",
        ),
        KEY,
    ),
    **dict.fromkeys((".env", ".env.*", "*.env", ".envrc"), ENVIRONMENT),
    **dict.fromkeys(
        (
            ".netrc", "_netrc", ".pgpass", "pgpass.conf", ".git-credentials", ".my.cnf",
            ".mylogin.cnf", ".htpasswd", "*.kdbx",
        ),
        PASSWORDS,
    ),
    **dict.fromkeys(
        (
            "application_default_credentials.json", "access_tokens.db", "credentials.db",
            "client_secret*.json", ".boto", "boto.cfg", ".s3cfg", ".dockercfg", ".databrickscfg",
        ),
        CLOUD,
    ),
    **dict.fromkeys(("kaggle.json", ".vault-token"), TOKEN),
    **dict.fromkeys(
        ("*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".terraformrc"), TERRAFORM
    ),
}  # fmt: skip
"""Patterns of file names."""

_REASONS = list(_FILES.values())
_ANY_FILE = re.compile(
    "|".join(f"({translate(pattern).removesuffix(_END)})" for pattern in _FILES), re.DOTALL
)

_PATHS: dict[tuple[str, ...], str] = {
    ("huggingface", "token"): TOKEN,
    ("huggingface", "stored_tokens"): TOKEN,
    (".huggingface", "token"): TOKEN,
    ("wandb", "settings"): TOKEN,
    (".cargo", "credentials"): TOKEN,
    (".cargo", "credentials.toml"): TOKEN,
    (".gem", "credentials"): TOKEN,
}
"""Files, by the last components of their path."""

_EXAMPLES = (".example", ".sample", ".template")
_BACKUP = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save|sw[a-p]|tmp|copy))$")
_PACKAGE_SETTINGS = {
    ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", "pip.conf", "pip.ini", ".condarc", "uv.toml",
}  # fmt: skip


def is_package_settings(name: str) -> bool:
    """True for a file of npm, pip or the like, which is secret if it holds a token or password."""
    return bool(_variants(name) & _PACKAGE_SETTINGS)


def secret_folder(parts: Sequence[str]) -> str | None:
    """The reason why nothing in a folder with this path is sent, or None."""
    return _by_ending(_FOLDERS, [_folded(part) for part in parts])


def secret_file(parts: Sequence[str]) -> str | None:
    """The reason why a file with this path is not sent, by its own name, or None."""
    *folders, last = parts
    above = [_folded(part) for part in folders]
    for name in _variants(last):
        if name.endswith(_EXAMPLES) and ".env" in name:
            continue
        if reason := _by_ending(_PATHS, [*above, name]):
            return reason
        if match := _ANY_FILE.fullmatch(name):
            return _REASONS[(match.lastindex or 1) - 1]
    return None


def _by_ending(table: dict[tuple[str, ...], str], parts: list[str]) -> str | None:
    for length in (1, 2):
        if reason := table.get(tuple(parts[-length:])):
            return reason
    return None


def _folded(name: str) -> str:
    if name.isascii():
        return name.lower().strip()
    folded = unicodedata.normalize("NFKC", name).casefold().strip()
    return "".join(letter for letter in folded if unicodedata.category(letter) != "Cf")


@lru_cache(maxsize=4096)
def _variants(name: str) -> frozenset[str]:
    """The name in lower case, and without what editors and backups add to it."""
    folded = _folded(name)
    names = {folded}
    if folded.endswith(_EXAMPLES):
        return frozenset(names)
    for start in (folded, folded.removeprefix("."), folded.removeprefix(".#").strip("#")):
        shorter = start
        while (cut := _BACKUP.sub("", shorter)) and cut != shorter:
            names.add(cut)
            shorter = cut
        if start.removeprefix(".") != folded.removeprefix("."):
            names.add(start)
    return frozenset(names)
