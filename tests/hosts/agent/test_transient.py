"""Transient and permanent errors of the set-up."""

import pytest

from drumline.hosts.agent.transient import find_transient_error

PASSING = [
    "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4750 "
    "(unattended-upgr)\nE: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), "
    "is another process using it?",
    "E: Could not get lock /var/lib/dpkg/lock - open (11: Resource temporarily unavailable)",
    "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1234 (apt-get)\n"
    "E: Unable to lock directory /var/lib/apt/lists/",
    "E: Could not get lock /var/cache/apt/archives/lock - open (11: Resource temporarily "
    "unavailable)",
    "dpkg: error: dpkg frontend lock was locked by another process with pid 2517",
    'error: snap "google-cloud-cli" has "auto-refresh" change in progress',
    "error: too early for operation, device not yet seeded or device model not acknowledged",
    "bash: line 3: gcloud: command not found",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon "
    "running?",
    "error getting credentials - err: exec: docker-credential-gcloud: exit status 1",
    "ERROR: (gcloud.auth.docker-helper) You do not currently have an active account selected.",
    'Error response from daemon: Get "https://gcr.io/v2/": net/http: TLS handshake timeout',
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError(': Failed to establish a new connection: [Errno -3] Temporary failure in "
    "name resolution')': /simple/jax/\nERROR: No matching distribution found for jax",
    "curl: (6) Could not resolve host: astral.sh",
    "fatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com",
    "E: Failed to fetch http://archive.ubuntu.com/x  Temporary failure resolving "
    "'archive.ubuntu.com'",
    "E: Failed to fetch http://archive.ubuntu.com/x  503  Service Unavailable [IP: 1.2.3.4 80]",
    "curl: (22) The requested URL returned error: 502",
    "ERROR: HTTP error 503 while getting https://files.pythonhosted.org/packages/x.whl",
    "ERROR: 503 Server Error: Service Unavailable for url: https://pypi.org/simple/jax/",
    "error: Failed to fetch: `https://pypi.org/simple/jax/`\n  Caused by: HTTP status server error "
    "(500 Internal Server Error) for url (https://pypi.org/simple/jax/)",
    "error sending request for url\n  Caused by: dns error: failed to lookup address information",
    "CondaHTTPError: HTTP 000 CONNECTION FAILED for url <https://conda.anaconda.org>",
    "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool: Read timed out.",
]
STAYING = [
    "ERROR: No matching distribution found for nope",
    "ERROR: Could not open requirements file: [Errno 2] No such file or directory",
    "E: Unable to locate package nope",
    "curl: (22) The requested URL returned error: 404",
    "ModuleNotFoundError: No module named 'jax'",
    "bash: line 1: nope: command not found",
    "fatal: repository 'https://github.com/a/nope/' not found",
    'denied: Permission "artifactregistry.repositories.downloadArtifacts" denied',
    "Error response from daemon: manifest for lab/train:nope not found: manifest unknown",
    "make: *** [Makefile:500: all] Error 2",
    "step 503: loss 2.1",
    "No space left on device",
    "",
]


@pytest.mark.parametrize("text", PASSING)
def test_errors_that_pass(text: str) -> None:
    assert find_transient_error(f"Reading package lists...\n{text}\n")


@pytest.mark.parametrize("text", STAYING)
def test_errors_that_stay(text: str) -> None:
    assert not find_transient_error(text)


def test_only_the_last_lines_show_why_a_step_failed() -> None:
    later = "".join(f"line {number}\n" for number in range(30))
    assert not find_transient_error(PASSING[0] + "\n" + later)
