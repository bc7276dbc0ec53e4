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
