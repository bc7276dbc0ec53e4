"""Recognises secret files and folders by their names.

Names are compared without case, compatibility forms of Unicode, and the endings of backups.
Contents are checked first: a private key is recognised under any name.
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
HISTORY = "history of commands"

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
    **dict.fromkeys((".*_history", ".*_history.*", ".lesshst", ".viminfo"), HISTORY),
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
    (".streamlit", "secrets.toml"): TOKEN,
}
"""Files, by the last components of their path."""

_EXAMPLES = (".example", ".sample", ".template")
_BACKUP = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save|sw[a-p]|tmp|copy))$")
_SETTINGS = {
    ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", "pip.conf", "pip.ini", ".condarc", "uv.toml",
    ".gitconfig", ".gitmodules",
}  # fmt: skip


def is_settings(components: Sequence[str]) -> bool:
    """Return True for settings of npm, pip, git and the like, which may have a token or password.

    The folder of a bare repository, `lib.git`, has a file `config`.
    """
    *folders, name = components
    in_repository = name == "config" and bool(folders) and folders[-1].endswith(".git")
    return in_repository or bool(_variants(name) & _SETTINGS)


def secret_folder(components: Sequence[str]) -> str | None:
    """Return the reason why nothing in a folder of this path is sent, or None."""
    return _find_by_ending(_FOLDERS, [_normalize(component) for component in components])


def secret_file(components: Sequence[str]) -> str | None:
    """Return the reason why a file of this name is not sent, or None."""
    *folders, file_name = components
    parents = [_normalize(component) for component in folders]
    for name in _variants(file_name):
        if name.endswith(_EXAMPLES) and ".env" in name:
            continue
        if reason := _find_by_ending(_PATHS, [*parents, name]):
            return reason
        if match := _ANY_FILE.fullmatch(name):
            return _REASONS[(match.lastindex or 1) - 1]
    return None


def _find_by_ending(table: dict[tuple[str, ...], str], components: list[str]) -> str | None:
    for length in (1, 2):
        if reason := table.get(tuple(components[-length:])):
            return reason
    return None


def _normalize(name: str) -> str:
    if name.isascii():
        return name.lower().strip()
    normalized = unicodedata.normalize("NFKC", name).casefold().strip()
    return "".join(character for character in normalized if unicodedata.category(character) != "Cf")


@lru_cache(maxsize=4096)
def _variants(name: str) -> frozenset[str]:
    """Return the name in lower case, also without the additions of editors and backups."""
    normalized = _normalize(name)
    names = {normalized}
    if normalized.endswith(_EXAMPLES):
        return frozenset(names)
    for stem in (
        normalized,
        normalized.removeprefix("."),
        normalized.removeprefix(".#").strip("#"),
    ):
        shorter = stem
        while (original := _BACKUP.sub("", shorter)) and original != shorter:
            names.add(original)
            shorter = original
        if stem.removeprefix(".") != normalized.removeprefix("."):
            names.add(stem)
    return frozenset(names)
