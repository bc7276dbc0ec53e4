"""Folders with secrets, and the files sent from each: `python -m tests.hosts.packing_table`."""

import base64
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import pkcs12

from drumline.hosts.code import CodeError, measure, pack
from drumline.hosts.packing import folders
from drumline.hosts.packing.rules import PackingRules

Out = TypeVar("Out")
GIT = shutil.which("git")
HEADER = "-----BEGIN OPENSSH PRIVATE KEY-----"


@dataclass
class Place:
    """A user's home, Drumline's home in it, and the working folder of a case."""

    user: Path
    """The user's home folder."""
    work: Path
    """The folder to send."""
    rules: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """Drumline's home by default."""
        return self.user / ".drumline"

    def write(self, name: str, text: str | bytes = "x = 1\n", mode: int = 0o644) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    def packing_rules(self) -> PackingRules:
        return PackingRules(environ={"HOME": str(self.user)}, **self.rules)


@dataclass(frozen=True)
class Case:
    """A folder and its expected result."""

    title: str
    build: Callable[[Place], None]
    sent: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    """Part of the error message; empty if the folder is sent."""


@dataclass(frozen=True)
class Result:
    sent: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    refused: str = ""


def run(case: Case) -> Result:
    """Build the folder of a case, pack it, and check that `measure` agrees."""
    # Not in pytest's folders, which only their owner can read.
    with tempfile.TemporaryDirectory(prefix="packing-") as scratch:
        base = Path(scratch)
        base.chmod(0o755)
        place = Place(base / "user", base / "user" / "project")
        place.work.mkdir(parents=True)
        make_drumline_home(place.home)
        case.build(place)
        into = base / "archives"
        rules = place.packing_rules()
        measured = _refusal_or(lambda: measure(place.work, rules=rules))
        archive = _refusal_or(lambda: pack(place.work, into, rules=rules))
        if isinstance(archive, str):
            assert isinstance(measured, str), "measure and pack differ"
            assert not into.exists() or not list(into.iterdir()), "something was written"
            return Result(refused=archive)
        assert not isinstance(measured, str), "measure and pack differ"
        with tarfile.open(archive.path) as tar:
            names = tuple(tar.getnames())
        assert measured.left_out == archive.left_out
        assert (measured.files, measured.bytes) == (archive.files, archive.bytes)
        return Result(names, {entry.path: entry.reason for entry in archive.left_out})


def _refusal_or(function: Callable[[], Out]) -> Out | str:
    try:
        return function()
    except CodeError as error:
        return str(error)


def make_drumline_home(home: Path) -> Path:
    for name in ("ssh", "known_hosts", "code", "logs", "secrets"):
        (home / name).mkdir(parents=True)
    (home / "jobs.db").write_bytes(b"SQLite format 3\0")
    (home / "ssh" / "id_ed25519").write_text(openssh_key())
    (home / "secrets" / "000001.json").write_text('{"TOKEN": "hf_abc"}')
    (home / "secrets" / "000001.json").chmod(0o600)
    home.chmod(0o700)
    return home


# Keys -------------------------------------------------------------------------------------------


@cache
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def key_bytes(
    key: Any = None,
    encoding: str = "PEM",
    form: str = "PKCS8",
    password: bytes | None = None,
) -> bytes:
    protection: Any = serialization.NoEncryption()
    if password:
        protection = serialization.BestAvailableEncryption(password)
    made: bytes = (key or rsa_key()).private_bytes(
        getattr(serialization.Encoding, encoding),
        getattr(serialization.PrivateFormat, form),
        protection,
    )
    return made


@cache
def openssh_key() -> str:
    return key_bytes(ed25519.Ed25519PrivateKey.generate(), form="OpenSSH").decode()


def service_account() -> str:
    return json.dumps(
        {
            "type": "service_account",
            "private_key": key_bytes().decode(),
            "client_email": "a@b",
        },
        indent=2,
    )


PUTTY = (
    "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nComment: me\nPublic-Lines: 1\n"
    "AAAAC3NzaC1lZDI1NTE5AAAAIP\nPrivate-Lines: 1\nAAAAIFw8vR0Yx7q3mZsample0000\n"
)
PGP = (
    # Split, so that this file itself contains no key.
    "-----BEGIN PGP PRIV"
    + "ATE KEY BLOCK-----\nVersion: GnuPG v2\n\n"
    + "lQdGBGSomeBase64DataOfAKeyThatIsLongEnough0000000000000000\n" * 3
    + "-----END PGP PRIVATE KEY BLOCK-----\n"
)
AGE = "AGE-SECRET-KEY-1" + "Q" * 58


# The folders ------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    assert GIT is not None
    settings = ("user.name=a", "user.email=a@b", "protocol.file.allow=always")
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run([GIT, "-C", str(folder), *options, *words], check=True, capture_output=True)


def plain(place: Place) -> None:
    place.write("train.py")


def user_home(place: Place) -> None:
    (place.user / "job.yaml").write_text("x")
    place.work = place.user


def above_home(place: Place) -> None:
    place.work = place.user.parent


def whole_file_system(place: Place) -> None:
    place.work = Path("/")


def home_by_link(place: Place) -> None:
    place.work = place.user.parent / "link"
    place.work.symlink_to(place.user)


def in_drumline_home(place: Place) -> None:
    place.work = place.home / "logs"


def in_other_drumline_home(place: Place) -> None:
    place.work = make_drumline_home(place.user / "lab" / "drumline2") / "code" / "mine"
    place.work.mkdir()


def drumline_home_inside(place: Place) -> None:
    plain(place)
    make_drumline_home(place.work / "state")
    make_drumline_home(place.work / "nested" / "deep" / ".drumline")


def drumline_home_in_checkout(place: Place) -> None:
    drumline_home_inside(place)
    git(place.work, "init")
    git(place.work, "add", "-A", "-f")
    git(place.work, "commit", "-m", "all of it")


def home_in_force_inside(place: Place) -> None:
    plain(place)
    place.rules["home"] = place.work / "fresh"
    place.write("fresh/config.yaml")


def home_by_environment(place: Place) -> None:
    plain(place)
    place.write("fresh/config.yaml")

    def rules() -> PackingRules:
        return PackingRules(
            environ={"HOME": str(place.user), "DRUMLINE_HOME": str(place.work / "fresh")}
        )

    place.packing_rules = rules  # type: ignore[method-assign]


def link_to_drumline_home(place: Place) -> None:
    plain(place)
    (place.work / "outer").symlink_to(place.home)
    (place.work / "key").symlink_to(place.home / "ssh" / "id_ed25519")
    (place.work / "twice").symlink_to("outer")


def hard_link_to_home(place: Place) -> None:
    plain(place)
    os.link(place.home / "secrets" / "000001.json", place.work / "data.json")
    os.link(place.home / "ssh" / "id_ed25519", place.work / "data.txt")
    place.rules["include"] = ("data.json", "data.txt")


def pem_keys(place: Place) -> None:
    plain(place)
    elliptic = ec.generate_private_key(ec.SECP256R1())
    place.write("a.txt", openssh_key())
    place.write("b.txt", key_bytes(form="TraditionalOpenSSL"))
    place.write("c.txt", key_bytes(elliptic, form="TraditionalOpenSSL"))
    place.write("d.txt", key_bytes(elliptic))
    place.write("e.txt", key_bytes(password=b"secret"))
    place.write("f.txt", key_bytes(form="TraditionalOpenSSL", password=b"secret"))
    place.write("g.txt", PGP)


def binary_keys(place: Place) -> None:
    plain(place)
    store = pkcs12.serialize_key_and_certificates(
        b"me", rsa_key(), None, None, serialization.BestAvailableEncryption(b"secret")
    )
    place.write("a.bin", store)
    place.write("b.bin", b"\xfe\xed\xfe\xed\0\0\0\2\0\0\0\1")
    place.write("c.bin", key_bytes(encoding="DER"))
    place.write("d.bin", key_bytes(encoding="DER", form="TraditionalOpenSSL"))
    place.write("e.bin", key_bytes(ec.generate_private_key(ec.SECP256R1()), encoding="DER"))
    place.write("f.bin", key_bytes(encoding="DER", password=b"secret"))


def other_keys(place: Place) -> None:
    plain(place)
    place.write("a.txt", PUTTY)
    place.write("b.txt", AGE)
    place.write("c.p12", "anything")
    place.write("d.ppk", "anything")
    place.write("ID_RSA.bak", "anything")


def hidden_keys(place: Place) -> None:
    plain(place)
    key = openssh_key()
    place.write("big.txt", b"x" * 3_000_000 + key.encode())
    place.write("conf.yaml", "key: |\n" + "".join(f"    {line}\n" for line in key.splitlines()))
    place.write("data.json", json.dumps({"key": key}))
    place.write("encoded.txt", "k: " + base64.b64encode(key.encode()).decode())
    place.write("source.py", "KEY = (\n" + "".join(f"    {line!r}\n" for line in key.splitlines()))
    place.write("wide.txt", key.encode("utf-16"))
    place.write("windows.txt", key.replace("\n", "\r\n"))


def mentions_of_keys(place: Place) -> None:
    place.write("check.py", f'if "{HEADER}" in text:\n    raise ValueError("a key in the file")\n')
    place.write("list.py", f'HEADERS = ["{HEADER}", "-----BEGIN RSA PRIVATE KEY-----"]\n')
    place.write("notes.md", f"A key begins with {HEADER} and its data follows.\n")
    place.write("cert.pem", "-----BEGIN CERTIFICATE-----\nMIIB" + "A" * 60 + "\n")
    place.write("id_rsa.pub", "ssh-rsa AAAAB3Nza me\n")


def environment_files(place: Place) -> None:
    for name in (".env", ".env.local", "prod.env", ".ENV", "sub/.env", ".env~"):
        place.write(name, "TOKEN=1\n")
    for name in (".env.example", ".env.sample", ".env.template", "environment.py"):
        place.write(name, "TOKEN=\n")


def password_files(place: Place) -> None:
    for name in (".netrc", ".pgpass", ".git-credentials", "kaggle.json"):
        place.write(name)
    place.write(".npmrc", "//registry.npmjs.org/:_authToken=npm_abc\n")
    place.write("a/.npmrc", "save-exact=true\n")
    place.write(".pypirc", "[pypi]\nusername = me\npassword = p\n")
    place.write("pip.conf", "[global]\nindex-url = https://me:pw@host/simple\n")
    place.write("a/pip.conf", "[global]\nindex-url = https://host/simple\n")
    place.write("cache/huggingface/token", "hf_x")
    place.write("token.txt", "hf_" + "a" * 34 + "\n")


def tokens_under_other_names(place: Place) -> None:
    plain(place)
    github, letters = "ghp" + "_" + "a" * 36, "abcdefghij" * 4
    url = f"https://{github}@github.com/lab/code"
    place.write("lib.git/config", f'[remote "origin"]\n    url = {url}\n')
    place.write("a/lib.git/config", '[remote "origin"]\n    url = git@github.com:lab/code\n')
    place.write(".gitmodules", f'[submodule "lib"]\n    url = {url}\n')
    place.write("pip.conf", f"[global]\nindex-url = {url}\n")
    place.write("note", f"{github}\n")
    place.write("cluster", f"kind: Config\nclusters: []\nusers:\n- user:\n    token: {letters}\n")
    field = "token"  # apart, so that this file does not look like a kubeconfig itself
    place.write("cluster.json", json.dumps({"kind": "Config", "clusters": [], field: letters}))
    place.write("export.csv", f"Access key ID,Secret access key\nAKIA,{letters}\n")
    place.write("keys.sh", f"export AWS_SECRET_ACCESS_KEY='{letters}'\n")
    place.write("logins", "# mine\nmachine api.wandb.ai\n  login user\n  password x\n")
    place.write("release", f"untrusted comment: minisign encrypted secret key\nRWRT{letters}\n")
    place.write(".streamlit/secrets.toml")
    place.write(".bash_history")
    place.write(".python_history")
    place.write("tokens.py", "token: str = open('token').read()\nkind = 'Config'\n")


def cloud_credentials(place: Place) -> None:
    plain(place)
    place.write("account.json", service_account())
    place.write("adc.json", '{"type": "authorized_user", "refresh_token": "1", "client_id": "2"}')
    place.write("application_default_credentials.json", "{}")
    for name in (".aws/credentials", ".config/gcloud/x/y", ".kube/config", ".azure/t", ".boto"):
        place.write(name)
    place.write(".docker/config.json", '{"auths": {"gcr.io": {"auth": "eA=="}}}')
    place.write("a/.docker/config.json", '{"credsStore": "desktop"}')
    place.write("main.tfstate")
    place.write("lab.tfvars")
    place.write(".ssh/config")
    place.write(".gnupg/pubring.kbx")


def owner_only(place: Place) -> None:
    plain(place)
    place.write("notes.txt", mode=0o600)
    place.write("mine/a.py")
    (place.work / "mine").chmod(0o700)


def umask_077(place: Place) -> None:
    place.write("train.py", mode=0o600)
    place.write("sub/model.py", mode=0o600)
    place.write(".env", mode=0o600)
    (place.work / "sub").chmod(0o700)


def umask_077_included(place: Place) -> None:
    umask_077(place)
    place.write("notes.txt", mode=0o600)
    place.write("deploy.py", openssh_key(), mode=0o600)
    place.rules["include"] = ("*.py",)


def included_by_path(place: Place) -> None:
    plain(place)
    place.write("keys/a.pem", openssh_key())
    place.write("keys/b.pem", openssh_key())
    place.write(".env", "A=1\n")
    place.write(".gitignore", ".env\n")
    place.rules["include"] = ("keys/a.pem", ".env")


def included_by_pattern(place: Place) -> None:
    plain(place)
    place.write("keys/a.pem", openssh_key())
    place.write(".env", "A=1\n")
    place.rules["include"] = ("*", "*.pem")


def included_outside(place: Place) -> None:
    plain(place)
    place.rules["include"] = ("../.ssh/id_rsa",)


def included_in_home(place: Place) -> None:
    drumline_home_inside(place)
    place.rules["include"] = ("state/ssh/id_ed25519",)


def included_nothing(place: Place) -> None:
    plain(place)
    place.rules["include"] = ("gone.pem",)


def links_to_keys(place: Place) -> None:
    plain(place)
    (place.user / "k").write_text(openssh_key())
    place.write("deploy/a.txt", openssh_key())
    place.write("b/.env")
    (place.work / "inner").symlink_to("deploy/a.txt")
    (place.work / "outer").symlink_to(place.user / "k")
    (place.work / "settings").symlink_to("b/.env")
    (place.work / "chain").symlink_to("inner")
    (place.work / "id_rsa").symlink_to("train.py")
    (place.work / "fine").symlink_to("train.py")


def link_out(place: Place) -> None:
    plain(place)
    (place.user / "data.txt").write_text("x")
    (place.work / "data").symlink_to("../data.txt")


def hard_link_to_key(place: Place) -> None:
    plain(place)
    (place.user / "k").write_text(openssh_key())
    os.link(place.user / "k", place.work / "weights.bin")


def sparse_gigabyte(place: Place) -> None:
    plain(place)
    with place.write("data.bin").open("wb") as file:
        file.truncate(10**9)


def checkpoint_inside(place: Place) -> None:
    plain(place)
    place.write("out/000001/state.bin")
    place.write("old/000007/drumline/lock")
    place.write("old/000007/100/commit_success.txt")
    place.write("older/drumline/best.json")
    place.write("older/200/commit_success.txt")
    place.write("older/200/state.bin")
    place.write("drumline/__init__.py")
    place.rules["checkpoint"] = str(place.work / "out")


def checkpoints_of_another_job_file(place: Place) -> None:
    """The other job saves in its own format."""
    plain(place)
    place.write("other/1a2b3c4d-000003/step-5.pt")
    place.write("other/1a2b3c4d-000004/step-5.pt")
    place.write("other/20261119-143000/loss.csv")
    place.rules["checkpoint"] = str(place.work / "out")
    place.rules["include"] = ("other/1a2b3c4d-000004",)


def checkpoint_is_workdir(place: Place) -> None:
    plain(place)
    place.write("000001/state.bin")
    place.write("1a2b3c4d-000002/step-5.pt")
    place.write("drumline/lock")
    place.write("100/commit_success.txt")
    place.rules["checkpoint"] = str(place.work)


def mounts_inside(place: Place) -> None:
    plain(place)
    place.write("data/c4.bin")
    place.write("bucket/x.bin")
    place.write("run/token", "abc")
    place.rules["mounts"] = {str(place.work / "data"): "gs://lab/c4"}


def nested_ignores(place: Place) -> None:
    plain(place)
    place.write(".gitignore", "*.log\n*.env\n!dev.env\n")
    place.write("dev.env", "A=1\n")
    place.write("a.log")
    place.write("sub/.gitignore", "!keep.log\n!.env\n")
    place.write("sub/keep.log")
    place.write("sub/.env", "A=1\n")


def checkout(place: Place) -> None:
    plain(place)
    for name in (".env", "id_ed25519", "new.env"):
        place.write(name)
    git(place.work, "init")
    git(place.work, "add", "train.py", ".env", "id_ed25519")
    git(place.work, "commit", "-m", "with secrets")


def submodule(place: Place) -> None:
    library = place.user / "library"
    library.mkdir()
    (library / "lib.py").write_text("x")
    (library / "deploy").write_text(openssh_key())
    git(library, "init")
    git(library, "add", "-A")
    git(library, "commit", "-m", "one")
    plain(place)
    git(place.work, "init")
    git(place.work, "submodule", "add", str(library), "lib")
    git(place.work, "add", "-A")
    git(place.work, "commit", "-m", "two")


def worktree(place: Place) -> None:
    checkout(place)
    git(place.work, "worktree", "add", str(place.user / "second"))
    place.work = place.user / "second"


def replaced_folder(place: Place) -> None:
    place.write("a/one.py")
    place.write("train.py")
    git(place.work, "init")
    git(place.work, "add", "-A")
    git(place.work, "commit", "-m", "one")
    shutil.rmtree(place.work / "a")
    (place.user / "else").mkdir()
    (place.user / "else" / "one.py").write_text("secret of another folder")
    (place.work / "a").symlink_to(place.user / "else")


def replaced_by_link(place: Place) -> None:
    """Replace a file by a link to a key after its check, before it is opened."""
    path = place.write("train.py")
    (place.user / "k").write_text(openssh_key())
    real = os.open

    def opened(name: Any, flags: int, *args: Any, **more: Any) -> int:
        if name == "train.py" and more.get("dir_fd") is not None:
            path.unlink()
            path.symlink_to(place.user / "k")
            try:
                return real(name, flags, *args, **more)
            finally:
                path.unlink()
                path.write_text("x = 1")
        return real(name, flags, *args, **more)

    _during_the_test(patch("os.open", opened))


def replaced_by_key(place: Place) -> None:
    """Change a file after it was listed: the packed bytes are checked."""
    path = place.write("train.py")
    place.write("a.py")
    real = os.open

    def opened(name: Any, flags: int, *args: Any, **more: Any) -> int:
        if name == "train.py" and more.get("dir_fd") is not None:
            path.write_text(openssh_key())
        return real(name, flags, *args, **more)

    _during_the_test(patch("os.open", opened))


def odd_files(place: Place) -> None:
    plain(place)
    os.mkfifo(place.work / "pipe")
    os.mkfifo(place.work / "id_rsa")
    place.write("ünïcode\n.py")
    place.write("ｉｄ_rsa")
    place.write(os.fsdecode(b"caf\xe9.py"))


_patches: list[Any] = []


def _during_the_test(change: Any) -> None:
    change.start()
    _patches.append(change)


@contextmanager
def undone() -> Iterator[None]:
    """Undo changes of a case to this process."""
    mounts = folders.mount_points

    def with_ours() -> set[str]:
        return mounts() | _planted_mounts()

    try:
        with patch("drumline.hosts.packing.folders.mount_points", with_ours):
            yield
    finally:
        while _patches:
            _patches.pop().stop()


def _planted_mounts() -> set[str]:
    """Pretend that `bucket` and the file `run/token` are mount points."""
    projects = Path(tempfile.gettempdir()).glob("packing-*/user/project")
    return {os.path.realpath(path / name) for path in projects for name in ("bucket", "run/token")}


KEY, HOME, ENV = "private key", "Drumline's home", "environment file"
CLOUD, PASSWORDS, TOKEN = "cloud credentials", "password file", "access token"
SETTINGS, PRIVATE = "settings with a token or password", "readable by you alone"
TERRAFORM = "Terraform state or variables"
LINK_HOME = "link to Drumline's home"

CASES = (
    Case("plain", plain, ("train.py",)),
    Case("the home folder", user_home, refused="your home folder"),
    Case("a folder above the home folder", above_home, refused="holds home folders"),
    Case("the whole file system", whole_file_system, refused="/ is the whole file system"),
    Case("a link to the home folder", home_by_link, refused="your home folder"),
    Case("inside Drumline's home", in_drumline_home, refused="in Drumline's home"),
    Case("inside another Drumline home", in_other_drumline_home, refused="in Drumline's home"),
    Case(
        "Drumline homes inside",
        drumline_home_inside,
        ("train.py",),
        {"state/": HOME, "nested/deep/.drumline/": HOME},
    ),
    Case(
        "Drumline homes in a checkout",
        drumline_home_in_checkout,
        ("train.py",),
        {"state/": HOME, "nested/deep/.drumline/": HOME},
    ),
    Case("the home in force inside", home_in_force_inside, ("train.py",), {"fresh/": HOME}),
    Case("$DRUMLINE_HOME inside", home_by_environment, ("train.py",), {"fresh/": HOME}),
    Case(
        "links to Drumline's home",
        link_to_drumline_home,
        ("train.py",),
        {"outer": LINK_HOME, "key": LINK_HOME, "twice": LINK_HOME},
    ),
    Case(
        "hard links into Drumline's home, under include",
        hard_link_to_home,
        ("train.py",),
        {"data.json": HOME, "data.txt": HOME},
    ),
    Case("PEM keys", pem_keys, ("train.py",), {f"{name}.txt": KEY for name in "abcdefg"}),
    Case("binary keys", binary_keys, ("train.py",), {f"{name}.bin": KEY for name in "abcdef"}),
    Case(
        "PuTTY, age and keys by name",
        other_keys,
        ("train.py",),
        dict.fromkeys(("a.txt", "b.txt", "c.p12", "d.ppk", "ID_RSA.bak"), KEY),
    ),
    Case(
        "keys inside other files",
        hidden_keys,
        ("train.py",),
        dict.fromkeys(
            (
                "big.txt", "conf.yaml", "data.json", "encoded.txt", "source.py", "wide.txt",
                "windows.txt",
            ),
            KEY,
        ),
    ),
    Case(
        "mentions of keys, and public ones",
        mentions_of_keys,
        ("cert.pem", "check.py", "id_rsa.pub", "list.py", "notes.md"),
    ),
    Case(
        ".env files",
        environment_files,
        (".env.example", ".env.sample", ".env.template", "environment.py"),
        dict.fromkeys((".env", ".env.local", "prod.env", ".ENV", "sub/.env", ".env~"), ENV),
    ),
    Case(
        "passwords and tokens",
        password_files,
        ("a/.npmrc", "a/pip.conf"),
        dict.fromkeys((".netrc", ".pgpass", ".git-credentials"), PASSWORDS)
        | dict.fromkeys((".npmrc", ".pypirc", "pip.conf"), SETTINGS)
        | dict.fromkeys(("kaggle.json", "cache/huggingface/token", "token.txt"), TOKEN),
    ),
    Case(
        "tokens under other names, and histories",
        tokens_under_other_names,
        ("a/lib.git/config", "tokens.py", "train.py"),
        dict.fromkeys(("lib.git/config", ".gitmodules", "pip.conf"), SETTINGS)
        | dict.fromkeys(("note", ".streamlit/secrets.toml"), TOKEN)
        | dict.fromkeys(("cluster", "cluster.json", "export.csv", "keys.sh"), CLOUD)
        | dict.fromkeys((".bash_history", ".python_history"), "history of commands")
        | {"logins": PASSWORDS, "release": KEY},
    ),
    Case(
        "cloud credentials",
        cloud_credentials,
        ("a/.docker/config.json", "train.py"),
        dict.fromkeys(
            (
                "adc.json", "application_default_credentials.json", ".aws/", ".config/gcloud/",
                ".kube/", ".azure/", ".boto",
            ),
            CLOUD,
        )
        | {
            "account.json": "service-account key",
            ".docker/config.json": "registry credentials",
            "main.tfstate": TERRAFORM,
            "lab.tfvars": TERRAFORM,
            ".ssh/": "SSH folder",
            ".gnupg/": "GnuPG folder",
        },
    ),
    Case("owner-only files", owner_only, ("train.py",), {"notes.txt": PRIVATE, "mine/": PRIVATE}),
    Case("umask 077", umask_077, refused="chmod -R go+rX"),
    Case(
        "umask 077 with include: *.py",
        umask_077_included,
        ("sub/model.py", "train.py"),
        {".env": ENV, "notes.txt": PRIVATE, "deploy.py": KEY},
    ),
    Case(
        "include by path",
        included_by_path,
        (".env", ".gitignore", "keys/a.pem", "train.py"),
        {"keys/b.pem": KEY},
    ),
    Case(
        "include by pattern sends no key",
        included_by_pattern,
        ("train.py",),
        {"keys/a.pem": KEY, ".env": ENV},
    ),
    Case("include outside", included_outside, refused="is not in /"),
    Case("include in Drumline's home", included_in_home, refused="cannot be sent"),
    Case("include that matches nothing", included_nothing, refused="matches nothing"),
    Case(
        "links to keys",
        links_to_keys,
        ("fine", "train.py"),
        dict.fromkeys(("deploy/a.txt", "inner", "outer", "chain", "id_rsa"), KEY)
        | dict.fromkeys(("b/.env", "settings"), ENV),
    ),
    Case("a link that leads out", link_out, refused="points out of the folder"),
    Case("a hard link to a key", hard_link_to_key, ("train.py",), {"weights.bin": KEY}),
    Case("a sparse file of 1 GB", sparse_gigabyte, refused="data.bin with 1,000.0 MB"),
    Case(
        "checkpoints inside",
        checkpoint_inside,
        ("drumline/__init__.py", "train.py"),
        {
            "out/": "checkpoints of this job file",
            "old/000007/": "checkpoints",
            "older/": "checkpoints",
        },
    ),
    Case(
        "checkpoints in the folder itself",
        checkpoint_is_workdir,
        ("train.py",),
        {
            "000001/": "checkpoints of this job file",
            "1a2b3c4d-000002/": "checkpoints of this job file",
            "drumline/": "checkpoints",
            "100/": "checkpoints",
        },
    ),
    Case(
        "checkpoints of another job file",
        checkpoints_of_another_job_file,
        (
            "other/1a2b3c4d-000004/step-5.pt",
            "other/20261119-143000/loss.csv",
            "train.py",
        ),
        {"other/1a2b3c4d-000003/": "checkpoints"},
    ),
    Case(
        "mounts inside",
        mounts_inside,
        ("train.py",),
        dict.fromkeys(("data/", "bucket/", "run/token"), "mount point"),
    ),
    Case(
        "nested .gitignore files that re-include",
        nested_ignores,
        (".gitignore", "sub/.gitignore", "sub/keep.log", "train.py"),
        {"dev.env": ENV, "sub/.env": ENV},
    ),
    Case(
        "a checkout with tracked secrets",
        checkout,
        ("train.py",),
        {".env": ENV, "new.env": ENV, "id_ed25519": KEY},
    ),
    Case(
        "a submodule with a key",
        submodule,
        (".gitmodules", "lib/lib.py", "train.py"),
        {"lib/deploy": KEY},
    ),
    Case("a worktree", worktree, ("train.py",), {".env": ENV, "id_ed25519": KEY}),
    Case(
        "a tracked folder replaced by a link",
        replaced_folder,
        refused="the link a points out of the folder",
    ),
    Case("a file replaced by a link while packing", replaced_by_link, refused="changed while"),
    Case(
        "a file replaced by a key while packing",
        replaced_by_key,
        ("a.py",),
        {"train.py": KEY},
    ),
    Case(
        "pipes and odd names",
        odd_files,
        (os.fsdecode(b"caf\xe9.py"), "train.py", "ünïcode\n.py"),
        {"ｉｄ_rsa": KEY},
    ),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    for case in CASES:
        with undone():
            result = run(case)
        print(case.title)
        if result.refused:
            print(f"    refused   {result.refused}")
            continue
        print(f"    sent      {', '.join(map(ascii, result.sent)) or 'nothing'}")
        for path, reason in result.left_out.items():
            print(f"    left out  {path} ({reason})")


if __name__ == "__main__":
    main()
