"""The last output of real programs and set-ups, from public issues and documentation."""

import pytest

from drumline.jobs.core.causes import Meaning, judge_output

PROGRAM, BAD_HOST = Meaning.PROGRAM, Meaning.BAD_HOST
AMBIGUOUS, TRANSIENT = Meaning.AMBIGUOUS_START, Meaning.TRANSIENT
OTHER_HOST, PREEMPTED = Meaning.OTHER_HOST, Meaning.PREEMPTED
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in <module>\n'
BACKEND = TRACEBACK + "RuntimeError: Unable to initialize backend 'tpu': "
PLATFORMS = " (set JAX_PLATFORMS='' to automatically choose an available backend)"

LAST_WORDS = [
    # Starts that the host or the program may have caused.
    (BACKEND + "INTERNAL: Failed to get global TPU topology." + PLATFORMS, AMBIGUOUS),
    ("RuntimeError: Bad StatusOr access: INTERNAL: Failed to get global TPU topology.", AMBIGUOUS),
    (BACKEND + "UNKNOWN: TPU initialization failed: No ba16c7433 device found.", AMBIGUOUS),
    ("E0000 tpu_driver.cc:42] No ba16c7433 device found.\n" + BACKEND + "UNKNOWN: x", AMBIGUOUS),
    (
        BACKEND + "FAILED_PRECONDITION: TPU initialization failed: open(/dev/vfio/0): Device or "
        "resource busy: Device or resource busy; Couldn't open iommu group /dev/vfio/0" + PLATFORMS,
        AMBIGUOUS,
    ),
    (
        BACKEND + "UNKNOWN: TPU initialization failed: open(/dev/accel0): Operation not permitted: "
        "Operation not permitted; Couldn't open device: /dev/accel0",
        AMBIGUOUS,
    ),
    (BACKEND + "UNKNOWN: TPU initialization failed: open(/dev/accel3): Device or resource busy",
     AMBIGUOUS),
    (BACKEND + "UNAVAILABLE: No TPU Platform available.", AMBIGUOUS),
    (BACKEND + "UNAVAILABLE: TPU backend setup/compile error (Unavailable).", AMBIGUOUS),
    (BACKEND + "DEADLINE_EXCEEDED: timed out" + PLATFORMS, AMBIGUOUS),
    (
        "RuntimeError: Bad StatusOr access: UNKNOWN: TPU initialization failed: Invalid "
        "--2a886c8_slice_builder_worker_addresses specified. Expected 4 worker addresses, got 1.",
        AMBIGUOUS,
    ),
    # Hosts.
    ("F0000 tpu.cc:99] Check failed: device->index_on_host() == i (0 vs. 1)", BAD_HOST),
    ("E0000 Couldn't open iommu group /dev/vfio/0\n" + BACKEND + "INTERNAL: x", BAD_HOST),
    (BACKEND + "UNKNOWN: TPU initialization failed: open(/dev/vfio/2): Input/output error",
     BAD_HOST),
    ("SLICE_FAILURE_CHIP_DRIVER_ERROR: worker 3", BAD_HOST),
    ("Mesh build was incomplete, unassigned nodes: 2", BAD_HOST),
    ("worker 3 missed 5 health checks", BAD_HOST),
    ("Failed to initialize TPU system", BAD_HOST),
    ("OSError: [Errno 5] Input/output error: '/dev/accel0'", BAD_HOST),
    ("Uncorrectable ECC error: HBM of chip 2", BAD_HOST),
    ("F0101 your job hit a bad TPU hardware. Physical location: tpu3:pe2:2", BAD_HOST),
    # Programs and their environments.
    (
        BACKEND + "ABORTED: The TPU is already in use by process with pid 1744. Not attempting to "
        "load libtpu.so in this process.", PROGRAM,
    ),
    (BACKEND + "ALREADY_EXISTS: libtpu.so already in use by another process", PROGRAM),
    (
        BACKEND + "ABORTED: The TPU is already in use by another process probably owned by "
        "another user. Run \"$ sudo lsof -w /dev/accel0\"", PROGRAM,
    ),
    (
        BACKEND + "INTERNAL: Failed to open libtpu.so: libtpu.so: cannot open shared object file: "
        "No such file or directory" + PLATFORMS, PROGRAM,
    ),
    (TRACEBACK + "RuntimeError: Unknown backend: 'tpu' requested, but no platforms that are "
     "instances of tpu are present.", PROGRAM),
    ("W0 TPU initialization failed, trying again\nstep 100\n" + TRACEBACK + "ValueError: x",
     PROGRAM),
    (
        "WARNING:jax: Unable to initialize backend 'tpu': INTERNAL: x\n" + TRACEBACK
        + "ModuleNotFoundError: No module named 'optax'", PROGRAM,
    ),
    (
        TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile "
        "permanent error. Ran out of memory in memory space hbm. Used 20.51G of 15.48G hbm.",
        PROGRAM,
    ),
    (
        TRACEBACK + "jax.errors.JaxRuntimeError: INTERNAL: Accelerator device halted prematurely, "
        "perhaps due to an on-device check-failure.", PROGRAM,
    ),
    ("An unexpected peer shows up in the launch group with a different launch id than the current "
     "group leader.", PROGRAM),
    (TRACEBACK + "requests.exceptions.ConnectionError: HTTPSConnectionPool: Failed to resolve: "
     "[Errno -3] Temporary failure in name resolution", PROGRAM),
    ("ERROR: No matching distribution found for nope", PROGRAM),
    ("/bin/bash: line 1: python3.13: command not found", PROGRAM),
    ("Bus error (core dumped)", PROGRAM),
    ("Physical location: rack7", PROGRAM),
    # Other hosts.
    (
        "E0929 17:42:48.594192 1044529 coordination_service_agent.cc:332] Polled an error from "
        "coordination service (this can be an error from this or another task).\nF0929 "
        "17:42:48.594200 1044529 client.h:77] Terminating process because the JAX distributed "
        "service detected fatal errors. This most likely indicates that another task died; see the "
        "other task logs for more details. absl::Status: UNAVAILABLE: Failed to send RPC to "
        "coordination service. Either the leader task was preempted/died/restarted unexpectedly or "
        "this task is experiencing network issues.", OTHER_HOST,
    ),
    ("Additional GRPC error information from remote target coordination_service while calling "
     "/tensorflow.CoordinationService/PollForError:", OTHER_HOST),
    (
        TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. "
        "Id: PjRT_Client_Connect. Timed out task names:\n/job:jax_worker/replica:0/task:1",
        OTHER_HOST,
    ),
    ("UNAVAILABLE: Task /job:jax_worker/replica:0/task:37 heartbeat timeout. This indicates that "
     "the remote task has failed, got preempted, or crashed unexpectedly.", OTHER_HOST),
    ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:4711", OTHER_HOST),
    # The cloud.
    ("Preemption notice received, saving a checkpoint", PREEMPTED),
    ("I0000 the VM was preempted", PREEMPTED),
    # Set-up steps.
    ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1719 "
     "(unattended-upgr)", TRANSIENT),
    ('error: snap "google-cloud-cli" has "install-snap" change in progress', TRANSIENT),
    ("error: too early for operation, device not yet seeded or device model not acknowledged",
     TRANSIENT),
    ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", TRANSIENT),
    ("curl: (6) Could not resolve host: astral.sh", TRANSIENT),
    ("curl: (35) Recv failure: Connection reset by peer", TRANSIENT),
    ("ERROR: HTTP error 503 while getting https://files.pythonhosted.org/x.whl", TRANSIENT),
    (
        'Traceback (most recent call last):\n  File "/usr/lib/python3/dist-packages/pip/_internal/'
        'cli/base_command.py", line 173\npip._vendor.urllib3.exceptions.ReadTimeoutError: '
        "HTTPSConnectionPool(host='files.pythonhosted.org'): Read timed out.", TRANSIENT,
    ),
    # More texts of XLA, Gloo, NCCL, pip, uv, apt, docker, git and gcloud.
    (TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile "
     "permanent error. Ran out of memory in memory space hbm. Used 17.35G of "
     "15.48G hbm.",
     PROGRAM),
    (TRACEBACK + "XlaRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel: Ran out of "
     "memory in memory space vmem",
     PROGRAM),
    (TRACEBACK + "jax.errors.JaxRuntimeError: UNAVAILABLE: The following tasks are unhealthy "
     "(stopped sending heartbeats):\n/job:jax_worker/replica:0/task:1\nThe tasks "
     "may have been killed or preempted.",
     OTHER_HOST),
    ("F0331 coordination_service_agent.cc:77] Terminating process because the JAX "
     "distributed service detected fatal errors. UNAVAILABLE: Task "
     "/job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates that the "
     "remote task has failed",
     OTHER_HOST),
    (TRACEBACK + "RuntimeError: Gloo context initialization failed: "
     "[external/gloo/gloo/transport/tcp/pair.cc:144] Connect timeout "
     "[10.128.0.3]:36475",
     OTHER_HOST),
    (TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: UNKNOWN: Gloo all-reduce failed: "
     "[external/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
     "30000ms for recv operation to complete",
     OTHER_HOST),
    (TRACEBACK + "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
     "Connection closed by peer [10.0.0.2]:3456",
     OTHER_HOST),
    (TRACEBACK + "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call "
     "failed possibly due to a network error or a remote process exiting "
     "prematurely.",
     OTHER_HOST),
    ("NCCL WARN socketProgress: Connection closed by remote peer w-1<4321>",
     OTHER_HOST),
    (TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: ABORTED: "
     "/job:jax_worker/replica:0/task:0 unexpectedly tried to connect with a "
     "different incarnation. It has likely restarted.",
     OTHER_HOST),
    (TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: failed to connect to all "
     "addresses; last error: UNKNOWN: ipv4:10.0.0.2:8476: Failed to connect to "
     "remote host: Connection refused",
     OTHER_HOST),
    (TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. "
     "Id: PjRT_Client_Connect::0. # of tasks that reached the barrier: 3/4.",
     OTHER_HOST),
    (TRACEBACK + "OSError: [Errno 28] No space left on device: '/home/me/ckpt'",
     PROGRAM),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space "
     "left on device",
     PROGRAM),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by "
     "insufficient shared memory (shm).",
     PROGRAM),
    ("ERROR: Could not find a version that satisfies the requirement "
     "jax[tpu]==9.9 (from versions: 0.4.1)\nERROR: No matching distribution found "
     "for jax[tpu]==9.9",
     PROGRAM),
    ("WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
     "'NewConnectionError: Failed to establish a new connection: [Errno 101] "
     "Network is unreachable': /simple/jax/\nERROR: Could not find a version that "
     "satisfies the requirement jax (from versions: none)\nERROR: No matching "
     "distribution found for jax",
     TRANSIENT),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
     PROGRAM),
    ("error: externally-managed-environment\n\n× This environment is "
     "externally managed",
     PROGRAM),
    ("error: Failed to fetch: `https://pypi.org/simple/jax/`\n  Caused by: "
     "Request failed after 3 retries\n  Caused by: error sending request for url "
     "(https://pypi.org/simple/jax/)\n  Caused by: operation timed out",
     TRANSIENT),
    ("error: Failed to fetch: `https://pypi.org/simple/jax/`\n  Caused by: "
     "Request failed after 3 retries\n  Caused by: error sending request for url\n"
     "  Caused by: client error (Connect)\n  Caused by: tcp connect error: "
     "Connection refused (os error 111)",
     TRANSIENT),
    ("E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: "
     "Permission denied)\nE: Unable to acquire the dpkg frontend lock "
     "(/var/lib/dpkg/lock-frontend), are you root?",
     PROGRAM),
    ("E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1234 "
     "(apt-get)\nE: Unable to lock directory /var/lib/apt/lists/",
     TRANSIENT),
    ("E: Could not open lock file /var/lib/apt/lists/lock - open (13: Permission "
     "denied)\nE: Unable to lock directory /var/lib/apt/lists/",
     PROGRAM),
    ("E: Unable to locate package libfoo-dev",
     PROGRAM),
    ("E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a' "
     "to correct the problem.",
     PROGRAM),
    ("Err:1 http://archive.ubuntu.com/ubuntu jammy InRelease\n  Could not connect "
     "to archive.ubuntu.com:80 (185.125.190.36), connection timed out\nE: Failed "
     "to fetch http://archive.ubuntu.com/ubuntu/pool/x.deb",
     TRANSIENT),
    ("W: Failed to fetch http://archive.ubuntu.com/ubuntu/dists/jammy/InRelease  "
     "Could not connect to archive.ubuntu.com:80 (91.189.91.83). - connect (111: "
     "Connection refused)\nE: Package 'x' has no installation candidate",
     TRANSIENT),
    ("docker: Error response from daemon: manifest for gcr.io/p/x:y not found: "
     "manifest unknown",
     PROGRAM),
    ("docker: Error response from daemon: pull access denied for foo, repository "
     "does not exist or may require 'docker login': denied: requested access to "
     "the resource is denied.",
     PROGRAM),
    ("permission denied while trying to connect to the Docker daemon socket at "
     "unix:///var/run/docker.sock",
     PROGRAM),
    ("Error response from daemon: Get \"https://registry-1.docker.io/v2/\": dial "
     "tcp 44.1.2.3:443: i/o timeout",
     TRANSIENT),
    ("Error response from daemon: Get \"https://us-docker.pkg.dev/v2/\": "
     "net/http: request canceled while waiting for connection (Client.Timeout "
     "exceeded while awaiting headers)",
     TRANSIENT),
    ("Error response from daemon: Get \"https://registry-1.docker.io/v2/\": dial "
     "tcp: lookup registry-1.docker.io on 169.254.169.254:53: server misbehaving",
     TRANSIENT),
    ("failed to register layer: write /usr/lib/x.so: no space left on device",
     PROGRAM),
    ("denied: Permission \"artifactregistry.repositories.downloadArtifacts\" "
     "denied on resource \"projects/p/locations/us/repositories/r\" (or it may "
     "not exist)",
     PROGRAM),
    ("fatal: could not read Username for 'https://github.com': No such device or "
     "address",
     PROGRAM),
    ("error: RPC failed; HTTP 502 curl 22 The requested URL returned error: 502\n"
     "fatal: expected flush after ref listing",
     TRANSIENT),
    ("error: RPC failed; curl 92 HTTP/2 stream 5 was not closed cleanly: CANCEL "
     "(err 8)\nfatal: early EOF\nfatal: fetch-pack: invalid index-pack output",
     TRANSIENT),
    ("fetch-pack: unexpected disconnect while reading sideband packet\nfatal: "
     "early EOF",
     TRANSIENT),
    ("git@github.com: Permission denied (publickey).\nfatal: Could not read from "
     "remote repository.",
     PROGRAM),
    ("kex_exchange_identification: Connection closed by remote host\nfatal: Could "
     "not read from remote repository.",
     TRANSIENT),
    (TRACEBACK + "google.api_core.exceptions.Forbidden: 403 GET "
     "https://storage.googleapis.com/storage/v1/b/x: me does not have "
     "storage.objects.get access to the Google Cloud Storage object.",
     PROGRAM),
    (TRACEBACK + "google.api_core.exceptions.ServiceUnavailable: 503 GET "
     "https://storage.googleapis.com/storage/v1/b/x: We encountered an internal "
     "error. Please try again.",
     PROGRAM),
    (TRACEBACK + "XlaRuntimeError: INTERNAL: Core halted unexpectedly: INTERNAL: Accelerator "
     "device halted prematurely, perhaps due to an on-device check-failure. Node "
     "0 halted unexpectedly at tag:pc TensorCoreSequencer:1:0x7b",
     PROGRAM),
    ("E0101 tpu.cc:12] Detected uncorrectable HBM ECC error on chip 2",
     BAD_HOST),
    ("bash: python: command not found",
     PROGRAM),
    ("/bin/bash: ./train.sh: Permission denied",
     PROGRAM),
    (TRACEBACK + "ModuleNotFoundError: No module named 'flax'",
     PROGRAM),
    (TRACEBACK + "RuntimeError: jaxlib version 0.4.30 is newer than and incompatible with jax "
     "version 0.4.26.",
     PROGRAM),
    (TRACEBACK + "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: libtpu version mismatch: "
     "client was built with 20250601, the device runtime is 20250301",
     PROGRAM),
    ("*** SIGABRT received by PID 1234 (TID 1234) on cpu 3 ***\nF0000 pjrt.cc] "
     "Check failed: PJRT_Api_Version mismatch",
     PROGRAM),
    ("wandb: ERROR api_key not configured (no-tty). call "
     "wandb.login(key=[your_api_key])",
     PROGRAM),
    (TRACEBACK + "wandb.errors.errors.CommError: Run initialization has timed out after 90.0 "
     "sec.",
     PROGRAM),
    (TRACEBACK + "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests "
     "for url: https://huggingface.co/api/models/x",
     PROGRAM),
    ("ERROR: (gcloud.storage.cp) HTTPError 403: me does not have "
     "storage.objects.list access to the Google Cloud Storage bucket.",
     PROGRAM),
    ("ERROR: gcloud crashed (ConnectionError): ('Connection aborted.', "
     "RemoteDisconnected('Remote end closed connection without response'))",
     TRANSIENT),
    ("ServiceException: 401 Anonymous caller does not have storage.objects.list "
     "access to bucket x.",
     PROGRAM),
    (TRACEBACK + "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.",
     PROGRAM),
    (TRACEBACK + "ValueError: NOT_FOUND: Error opening \"zarr\" driver: Metadata at "
     "gs://b/x/.zarray does not exist",
     PROGRAM),
    (TRACEBACK + "RuntimeError: Unable to initialize backend 'tpu': INTERNAL: Failed to open "
     "/dev/vfio/vfio: Permission denied",
     AMBIGUOUS),
    ("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  "
     "what():  [enforce fail at external/gloo/gloo/transport/tcp/device.cc:83] "
     "ifa != nullptr. Unable to find address for: t1v-n-abc-w-0",
     PROGRAM),
    ("make: *** [Makefile:3: data] Error 1",
     PROGRAM),
    ("make: *** [Makefile:3: data] Error 500",
     PROGRAM),
    ("step 502: loss 3.1\nValueError: bad",
     PROGRAM),
    ("error: 500 samples of 502 are invalid",
     PROGRAM),
]  # fmt: skip


@pytest.mark.parametrize(("words", "meaning"), LAST_WORDS, ids=lambda value: str(value)[-40:])
def test_the_meaning_of_the_last_words(words: str, meaning: Meaning) -> None:
    assert judge_output(1, f"step 7\n{words}\n").meaning is meaning


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (0, Meaning.NONE),
        (75, Meaning.RESTART),
        (-15, Meaning.STOPPED),
        (143, Meaning.STOPPED),
        (137, PROGRAM),
        (-9, PROGRAM),
        (139, PROGRAM),
        (1, PROGRAM),
    ],
)
def test_the_meaning_of_an_exit_code_alone(code: int, meaning: Meaning) -> None:
    assert judge_output(code, "step 7\n").meaning is meaning


def test_the_same_error_has_the_same_words_on_another_machine() -> None:
    error = "UNKNOWN: TPU initialization failed: open(/dev/vfio/{}): Device or resource busy"
    words = {judge_output(1, error.format(number)).words for number in (0, 7)}
    assert len(words) == 1
    assert judge_output(1, "No ba16c7433 device found").words not in words
