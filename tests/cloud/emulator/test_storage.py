"""Cloud Storage through its real clients: Google's own, gcsfs and TensorStore."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import requests
from google.api_core.exceptions import BadRequest, Conflict, NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[attr-defined,import-untyped,unused-ignore]

from drumline.cloud.emulator import launch
from drumline.cloud.emulator.api.storage import client_environment
from drumline.cloud.emulator.checksums import extend_crc32c
from tests.buckets import StorageServer, serve_buckets

if TYPE_CHECKING:
    from tests.cloud.conftest import Emulator
else:
    Emulator = Any

MANY_BYTES = 20 << 20


@pytest.fixture
def google(bucket: str) -> Iterator[Any]:
    """A bucket of Google's client."""
    with closing(storage.Client()) as client:
        yield client.bucket(bucket.removeprefix("gs://"))


def names(google: Any, **options: Any) -> list[str]:
    return [blob.name for blob in google.client.list_blobs(google, **options)]


def generation(google: Any, name: str) -> int:
    return int(google.get_blob(name).generation)


# Google's client


def test_an_object_is_created_only_once(google: Any) -> None:
    google.blob("lock").upload_from_string("mine", if_generation_match=0)
    with pytest.raises(PreconditionFailed, match="pre-conditions you specified did not hold"):
        google.blob("lock").upload_from_string("theirs", if_generation_match=0)
    assert google.blob("lock").download_as_bytes() == b"mine"
    google.blob("lock").delete()
    google.blob("lock").upload_from_string("again", if_generation_match=0)


def test_a_change_takes_effect_only_at_the_expected_generation(google: Any) -> None:
    blob = google.blob("state")
    blob.upload_from_string("1")
    first = blob.generation
    blob.upload_from_string("2", if_generation_match=first)
    second = blob.generation
    assert second > first
    changes: tuple[Callable[[], None], ...] = (
        lambda: blob.upload_from_string("3", if_generation_match=first),
        lambda: blob.delete(if_generation_match=first),
        lambda: blob.upload_from_string("3", if_generation_not_match=second),
        lambda: blob.upload_from_string("3", if_metageneration_match=7),
    )
    for change in changes:
        with pytest.raises(PreconditionFailed):
            change()
    assert blob.download_as_bytes(if_generation_match=second) == b"2"
    blob.delete(if_generation_match=second)
    assert not blob.exists()
    with pytest.raises(NotFound, match="No such object"):
        blob.delete()


def test_generations_grow_even_if_the_clock_does_not(google: Any, bucket_folder: Path) -> None:
    generations = []
    for content in range(50):
        blob = google.blob("counter")
        blob.upload_from_string(str(content))
        generations.append(blob.generation)
        if content % 10 == 9:
            blob.delete()
    assert generations == sorted(set(generations))
    ahead = 4_000_000_000 * 10**9
    (bucket_folder / "counter").write_text("from a host whose clock is wrong")
    os.utime(bucket_folder / "counter", ns=(ahead, ahead))
    google.blob("counter").upload_from_string("later")
    assert generation(google, "counter") > ahead // 1000


def test_lists_have_prefixes_pages_and_offsets(google: Any) -> None:
    all_names = ["a", "b-1/x", "b.txt", "b/1", "b/2/x", "b/2/y", "b/3", "b0", "c/x", "ä/ü"]
    for name in reversed(all_names):
        google.blob(name).upload_from_string(name)
    assert names(google) == all_names
    assert names(google, page_size=3) == all_names
    assert names(google, prefix="b/") == ["b/1", "b/2/x", "b/2/y", "b/3"]
    assert names(google, prefix="b/2") == ["b/2/x", "b/2/y"]
    assert names(google, start_offset="b/2/y", end_offset="c") == ["b/2/y", "b/3", "b0"]
    for prefix in ("no/such", "b//", "/b", "../", "b/../b", "b/.", "b" * 1025):
        assert names(google, prefix=prefix) == []
    for size in (None, 1, 2):
        listing = google.client.list_blobs(google, prefix="b", delimiter="/", page_size=size)
        assert [blob.name for blob in listing] == ["b.txt", "b0"]
        assert listing.prefixes == {"b/", "b-1/"}
    listing = google.client.list_blobs(google, prefix="b/", delimiter="/")
    assert [blob.name for blob in listing] == ["b/1", "b/3"]
    assert listing.prefixes == {"b/2/"}


def test_a_large_object_is_uploaded_in_chunks_and_read_in_parts(google: Any) -> None:
    content = os.urandom(MANY_BYTES)
    blob = google.blob("large", chunk_size=1 << 20)
    blob.upload_from_string(content, if_generation_match=0)
    assert (blob.size, blob.content_type) == (MANY_BYTES, "text/plain")
    # Google's client compares the checksum of what it reads.
    assert google.blob("large").download_as_bytes() == content
    assert google.blob("large").download_as_bytes(start=10, end=19) == content[10:20]
    assert google.blob("large").download_as_bytes(start=MANY_BYTES - 5) == content[-5:]
    with blob.open("rb") as file:
        file.seek(1000)
        assert file.read(24) == content[1000:1024]
    with pytest.raises(PreconditionFailed):
        google.blob("large", chunk_size=1 << 20).upload_from_string(
            b"x" * 10, if_generation_match=0
        )


def test_metadata_is_kept_and_changed(google: Any, bucket_folder: Path) -> None:
    blob = google.blob("report")
    blob.metadata = {"step": "7"}
    blob.upload_from_string("{}", content_type="application/json")
    again = google.get_blob("report")
    assert (again.content_type, again.metadata) == ("application/json", {"step": "7"})
    assert (again.size, again.storage_class, again.metageneration) == (2, "STANDARD", 1)
    assert again.crc32c
    assert again.md5_hash
    assert again.etag
    assert again.updated == again.time_created
    again.metadata = {"step": "8", "host": "0"}
    again.patch()
    blob.reload()
    assert (blob.metadata, blob.metageneration) == ({"step": "8", "host": "0"}, 2)
    assert blob.generation == again.generation
    (bucket_folder / "report").write_text("written by a host")
    with pytest.raises(NotFound, match="No such object"):
        blob.download_as_bytes()  # The client requests the generation that it wrote.
    written = google.get_blob("report")
    assert (written.metadata, written.size) == (None, 17)
    assert written.generation > again.generation


def test_a_batch_deletes_many(google: Any) -> None:
    for index in range(30):
        google.blob(f"many/ü {index}").upload_from_string("x")
    with google.client.batch():
        for index in range(30):
            google.blob(f"many/ü {index}").delete()
    assert names(google) == []
    with pytest.raises(NotFound), google.client.batch():
        google.blob("missing").delete()


def test_objects_are_copied_and_joined(google: Any) -> None:
    for name in ("one", "two"):
        google.blob(name).upload_from_string(name, content_type="text/x")
    joined = google.blob("sub/joined")
    joined.compose([google.blob("one"), google.blob("two")], if_generation_match=0)
    assert joined.download_as_bytes() == b"onetwo"
    with pytest.raises(PreconditionFailed):
        joined.compose([google.blob("one")], if_generation_match=0)
    copy = google.blob("copy")
    assert copy.rewrite(google.blob("one"))[0] is None
    copy.reload()
    assert (copy.download_as_bytes(), copy.content_type) == (b"one", "text/x")
    with pytest.raises(PreconditionFailed):
        copy.rewrite(google.blob("two"), if_source_generation_match=1)
    with pytest.raises(NotFound):
        google.copy_blob(google.blob("missing"), google, "x")
    google.copy_blob(google.blob("two"), google, "copy")
    assert google.blob("copy").download_as_bytes() == b"two"


def test_buckets_are_folders(google: Any, bucket_folder: Path) -> None:
    client = google.client
    made = client.create_bucket(f"{bucket_folder.name}-new")
    assert (bucket_folder.parent / made.name).is_dir()
    assert {bucket_folder.name, made.name} <= {bucket.name for bucket in client.list_buckets()}
    with pytest.raises(Conflict):
        client.create_bucket(made.name)
    made.blob("x").upload_from_string("x")
    with pytest.raises(Conflict, match="not empty"):
        made.delete()
    made.blob("x").delete()
    made.delete()
    assert client.lookup_bucket(made.name) is None
    with pytest.raises(NotFound, match="bucket does not exist"):
        made.blob("x").upload_from_string("x")
    with pytest.raises(BadRequest, match="Invalid bucket name"):
        client.create_bucket("No-Capitals")


# Objects as files


def test_hosts_and_clients_see_the_same_objects(google: Any, bucket_folder: Path) -> None:
    google.blob("run/7/state").upload_from_string("from a client")
    assert (bucket_folder / "run" / "7" / "state").read_text() == "from a client"
    (bucket_folder / "run" / "8" / "empty").mkdir(parents=True)
    (bucket_folder / "run" / "8" / "state").write_text("from a host")
    assert names(google, prefix="run/") == ["run/7/state", "run/8/state"]
    blob = google.get_blob("run/8/state")
    assert blob.download_as_bytes(if_generation_match=blob.generation) == b"from a host"
    blob.delete(if_generation_match=blob.generation)
    google.blob("run/7/state").delete()
    assert not (bucket_folder / "run" / "7").exists()


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "ü/日本",
        "50%2F/x",
        "a%20b",
        "q?x=1&y#z",
        "'\"\\",
        "a+b",
        "~",
        "x" * 255,
        "y/" * 100 + "z",
    ],
)
def test_every_name_comes_back(google: Any, name: str) -> None:
    google.blob(name).upload_from_string(name)
    assert names(google) == names(google, prefix=name) == [name]
    assert google.get_blob(name).download_as_bytes() == name.encode()
    google.blob(f"{name}2"[-250:]).rewrite(google.blob(name))
    google.blob(name).delete()
    assert len(names(google)) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("..", "objects are files"),
        ("../escaped", "objects are files"),
        ("a/../../escaped", "objects are files"),
        ("a/./b", "objects are files"),
        ("a//b", "objects are files"),
        ("/a", "objects are files"),
        ("a\nb", "Invalid object name"),
        ("x" * 256, "at most 255 bytes"),
        ("ü" * 600, "at most 1024 bytes"),
        ("file/below", "cannot be an object and a prefix"),
        ("folder", "cannot be an object and a prefix"),
    ],
)
def test_a_name_that_cannot_be_a_file_is_rejected(
    google: Any, bucket_folder: Path, name: str, reason: str
) -> None:
    google.blob("file").upload_from_string("1")
    google.blob("folder/x").upload_from_string("2")
    with pytest.raises(BadRequest, match=reason):
        google.blob(name).upload_from_string("3")
    assert names(google) == ["file", "folder/x"]
    assert not (bucket_folder.parent / "escaped").exists()


def test_a_name_that_ends_with_a_slash_is_an_empty_folder(google: Any, bucket_folder: Path) -> None:
    google.blob("run/logs/").upload_from_string("")
    assert (bucket_folder / "run" / "logs").is_dir()
    assert names(google) == ["run/logs/"]
    google.blob("run/logs/1").upload_from_string("x")
    google.blob("run/logs/1").delete()
    assert names(google) == ["run/logs/"]
    assert google.get_blob("run/logs/").size == 0
    listing = google.client.list_blobs(google, prefix="run/", delimiter="/")
    assert ([blob.name for blob in listing], listing.prefixes) == ([], {"run/logs/"})
    trailing = google.client.list_blobs(
        google, prefix="run/", delimiter="/", include_trailing_delimiter=True
    )
    assert [blob.name for blob in trailing] == ["run/logs/"]
    with pytest.raises(BadRequest, match="must be empty"):
        google.blob("run/other/").upload_from_string("content")
    google.blob("run/logs/").delete()
    assert names(google) == []
    assert not (bucket_folder / "run").exists()


def test_links_are_not_followed(google: Any, bucket_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (bucket_folder / "link").symlink_to(tmp_path)
    (bucket_folder / "file").symlink_to(tmp_path / "secret")
    assert names(google) == []
    assert not google.blob("link/secret").exists()
    assert not google.blob("file").exists()
    with pytest.raises(BadRequest, match="symbolic link"):
        google.blob("link/new/x").upload_from_string("x")
    assert not (tmp_path / "new").exists()


# Races and lost responses


def test_one_of_two_concurrent_creates_succeeds(google: Any) -> None:
    wins: list[tuple[str, int]] = []
    both = threading.Barrier(2)

    def create(who: str) -> None:
        with closing(storage.Client()) as client:
            own = client.bucket(google.name)
            for index in range(100):
                both.wait()
                try:
                    own.blob(f"lock-{index}").upload_from_string(who, if_generation_match=0)
                except PreconditionFailed:
                    continue
                wins.append((who, index))

    threads = [threading.Thread(target=create, args=(who,)) for who in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(index for _, index in wins) == list(range(100))
    for who, index in wins:
        assert google.blob(f"lock-{index}").download_as_bytes() == who.encode()


class LosesAnswers(requests.adapters.HTTPAdapter):
    """A network that loses the responses to some uploads after they took effect."""

    def __init__(self, loses: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.loses, self.lost = loses, 0

    def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
        response = super().send(request, *arguments, **options)
        if self.lost == 0 and self.loses(request, response):
            self.lost += 1
            response.close()
            raise requests.exceptions.ConnectionError("the answer was lost")
        return response


@contextmanager
def losing(google: Any, loses: Callable[[Any, Any], bool]) -> Iterator[tuple[Any, LosesAnswers]]:
    """The same bucket through a network that loses responses."""
    with closing(storage.Client()) as client:
        network = LosesAnswers(loses)
        client._http.mount("http://", network)
        yield client.bucket(google.name), network


def test_a_repeated_create_after_a_lost_response_is_rejected(google: Any) -> None:
    with losing(google, lambda request, _: "uploadType" in request.url) as (far, network):
        with pytest.raises(PreconditionFailed):
            far.blob("lock").upload_from_string("mine", if_generation_match=0)
        assert network.lost == 1
    # A caller that gets 412 must therefore check if the object is its own.
    assert google.blob("lock").download_as_bytes() == b"mine"


@pytest.mark.parametrize("status", [308, 200])
def test_a_resumable_upload_survives_a_lost_answer(google: Any, status: int) -> None:
    content = os.urandom(9 << 20)  # Google's client sends less in one call.

    def loses(request: Any, response: Any) -> bool:
        return "upload_id" in request.url and response.status_code == status

    with losing(google, loses) as (far, network):
        blob = far.blob("large", chunk_size=1 << 20)
        blob.upload_from_string(content, if_generation_match=0)
        assert network.lost == 1
    assert google.blob("large").download_as_bytes() == content


# The API itself


@pytest.fixture
def http(storage_server: StorageServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=storage_server.url) as client:
        yield client


def test_errors_are_those_of_google(http: Any, google: Any) -> None:
    google.blob("x").upload_from_string("content")
    now = generation(google, "x")
    objects = f"storage/v1/b/{google.name}/o"

    def error(path: str, **options: Any) -> tuple[int, str]:
        answer = http.get(path, **options)
        body = answer.json()["error"]
        assert body["code"] == answer.status_code
        assert body["message"] == body["errors"][0]["message"]
        return answer.status_code, body["errors"][0]["reason"]

    assert error(f"{objects}/no") == (404, "notFound")
    assert error("storage/v1/b/no-such-bucket/o") == (404, "notFound")
    assert error("storage/v2/b") == (404, "notFound")
    assert error(f"{objects}/x?generation=1") == (404, "notFound")
    assert error(f"{objects}/x?ifGenerationMatch=1") == (412, "conditionNotMet")
    assert error(f"{objects}/x?ifGenerationMatch=y") == (400, "invalid")
    assert error(f"{objects}?pageToken=%25") == (400, "invalid")
    beyond = {"headers": {"Range": "bytes=99-"}}
    assert error(f"{objects}/x?alt=media", **beyond) == (416, "requestedRangeNotSatisfiable")
    for path in (f"{objects}/x", f"{objects}/x?alt=media"):
        separator = "&" if "?" in path else "?"
        answer = http.get(f"{path}{separator}ifGenerationNotMatch={now}")
        assert (answer.status_code, answer.content) == (304, b"")


def test_ranges_are_those_of_http(http: Any, google: Any) -> None:
    google.blob("x").upload_from_string("0123456789")
    path = f"download/storage/v1/b/{google.name}/o/x?alt=media"
    for header, status, content in (
        ("bytes=2-3", 206, b"23"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=0-99", 206, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ):
        answer = http.get(path, headers={"Range": header})
        assert (answer.status_code, answer.content) == (status, content), header
        assert answer.headers["x-goog-generation"] == str(generation(google, "x"))


def test_a_resumable_upload_can_be_asked_about_and_cancelled(http: Any, google: Any) -> None:
    begin = f"upload/storage/v1/b/{google.name}/o?uploadType=resumable&name=x"
    url = http.post(begin, json={"contentType": "text/x"}).headers["location"]
    status = http.put(url, headers={"Content-Range": "bytes */*"})
    assert (status.status_code, "range" in status.headers) == (308, False)
    part = http.put(url, content=b"01234", headers={"Content-Range": "bytes 0-4/*"})
    assert (part.status_code, part.headers["range"]) == (308, "bytes=0-4")
    gap = http.put(url, content=b"9", headers={"Content-Range": "bytes 9-9/10"})
    assert gap.status_code == 400
    # The second half of the repeated data is new.
    again = http.put(url, content=b"345678", headers={"Content-Range": "bytes 3-8/*"})
    assert again.headers["range"] == "bytes=0-8"
    assert names(google) == []
    last = http.put(url, content=b"9", headers={"Content-Range": "bytes 9-9/10"})
    assert (last.status_code, last.json()["size"]) == (200, "10")
    assert http.put(url, headers={"Content-Range": "bytes */10"}).json() == last.json()
    assert google.blob("x").download_as_bytes() == b"0123456789"

    cancelled = http.post(begin.replace("name=x", "name=y")).headers["location"]
    http.put(cancelled, content=b"0", headers={"Content-Range": "bytes 0-0/*"})
    assert http.delete(cancelled).status_code == 499
    assert http.put(cancelled, content=b"").status_code == 404
    assert names(google) == ["x"]


def test_damaged_content_is_rejected(http: Any, google: Any) -> None:
    path = f"upload/storage/v1/b/{google.name}/o?uploadType=media&name=x"
    for wrong in ("crc32c=AAAAAA==", "md5=AAAAAAAAAAAAAAAAAAAAAA=="):
        answer = http.post(path, content=b"content", headers={"X-Goog-Hash": wrong})
        assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (
            400,
            "invalid",
        )
        assert "doesn't match" in answer.text
    assert names(google) == []


def test_the_content_of_a_multipart_upload_may_be_anything(http: Any, google: Any) -> None:
    for newline in (b"\r\n", b"\n"):
        for content in (b"", b"\r", b"\r\n", b"\n--b\n", b"--b--", os.urandom(1000)):
            body = newline.join(
                [b"--b", b"Content-Type: application/json", b"", b'{"name": "x"}',
                 b"--b", b"Content-Type: text/x", b"", content, b"--b--"]
            )  # fmt: skip
            answer = http.post(
                f"upload/storage/v1/b/{google.name}/o?uploadType=multipart",
                content=body,
                headers={"Content-Type": "multipart/related; boundary=b"},
            )
            assert answer.json()["contentType"] == "text/x"
            assert google.blob("x").download_as_bytes() == content


def test_crc32c_in_plain_python_is_that_of_the_library() -> None:
    import google_crc32c  # type: ignore[import-untyped,unused-ignore]

    for content in (b"", b"123456789", os.urandom(10_000)):
        assert extend_crc32c(0, content) == google_crc32c.value(content)
        half = len(content) // 2
        assert extend_crc32c(extend_crc32c(0, content[:half]), content[half:]) == (
            google_crc32c.value(content)
        )


def test_a_server_that_starts_again_has_the_objects_and_no_drafts(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    upload = "upload/storage/v1/b/runs/o?name=x"
    with serve_buckets(tmp_path) as server:
        before = httpx.post(f"{server.url}/{upload}&uploadType=media", content=b"1").json()
        begun = httpx.post(f"{server.url}/{upload}&uploadType=resumable").headers["location"]
        httpx.put(begun, content=b"0", headers={"Content-Range": "bytes 0-0/*"})
        assert list((tmp_path / ".drafts").iterdir())
    with serve_buckets(tmp_path) as server:
        after = httpx.get(f"{server.url}/storage/v1/b/runs/o/x").json()
        assert after["generation"] == before["generation"]
        assert after["crc32c"] == before["crc32c"]
        assert not (tmp_path / ".drafts").exists()


# gcsfs and TensorStore


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_gcsfs_reads_and_writes(bucket: str, google: Any) -> None:
    import gcsfs  # type: ignore[import-untyped,unused-ignore]

    files = gcsfs.GCSFileSystem()
    root, content = bucket.removeprefix("gs://"), os.urandom(MANY_BYTES)
    files.pipe(f"{root}/run/small", b"small")
    with files.open(f"{root}/run/deep/large", "wb") as file:
        file.write(content)
    with files.open(f"{root}/run/deep/large", "rb") as file:
        file.seek(1 << 20)
        assert file.read(1000) == content[1 << 20 :][:1000]
    assert files.cat(f"{root}/run/deep/large") == content
    assert sorted(files.ls(f"{root}/run")) == [f"{root}/run/deep", f"{root}/run/small"]
    assert files.find(root) == [f"{root}/run/deep/large", f"{root}/run/small"]
    assert files.info(f"{root}/run/small")["size"] == 5
    with pytest.raises(FileExistsError):
        files.pipe(f"{root}/run/small", b"other", mode="create")
    files.mv(f"{root}/run/small", f"{root}/moved")
    files.cp(f"{root}/moved", f"{root}/run/copied")
    assert files.cat(f"{root}/run/copied") == b"small"
    files.rm(f"{root}/run", recursive=True)
    assert names(google) == ["moved"]
    assert not files.exists(f"{root}/run")
    with pytest.raises(FileNotFoundError):
        files.cat(f"{root}/run/small")


@pytest.mark.parametrize(
    "spec",
    [
        lambda bucket: {"driver": "zarr", "kvstore": f"{bucket}/zarr/"},
        lambda bucket: {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": f"{bucket}/ocdbt/"},
        },
    ],
    ids=["zarr", "ocdbt"],
)
def test_tensorstore_writes_and_reads_arrays(bucket: str, google: Any, spec: Any) -> None:
    import tensorstore  # type: ignore[import-untyped,unused-ignore]

    values = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    created = tensorstore.open(
        spec(bucket), create=True, dtype=tensorstore.float32, shape=[100, 100]
    ).result()
    created.write(values).result()
    created[5, 5] = -1.0
    values[5, 5] = -1.0
    again = tensorstore.open(spec(bucket)).result()
    assert np.array_equal(again.read().result(), values)
    assert names(google)


def test_tensorstore_writes_only_at_a_generation(bucket: str) -> None:
    import tensorstore

    store = tensorstore.KvStore.open(f"{bucket}/").result()
    first = store.write("x", b"1").result()
    second = store.write("x", b"2", if_equal=first.generation).result()
    missed = store.write("x", b"3", if_equal=first.generation).result()
    assert missed.generation != second.generation
    assert store.read("x").result().value == b"2"
    assert store.list().result() == [b"x"]
    store.delete_range(tensorstore.KvStore.KeyRange("a", "z")).result()
    assert store.list().result() == []


# The emulator


def test_the_page_names_the_variables_for_clients() -> None:
    page = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text()
    for name in client_environment("http://x"):
        assert f"| `{name}` |" in page


def test_the_emulator_serves_its_buckets_to_its_owner(emulator: Emulator) -> None:
    access = launch.find(emulator.home)
    assert access is not None
    (emulator.home / "buckets" / "shared").mkdir()
    nobody = AnonymousCredentials()  # type: ignore[no-untyped-call]
    endpoint = {"api_endpoint": access.storage}
    with closing(storage.Client("p", nobody, client_options=endpoint)) as client:
        blob = client.bucket("shared").blob("from a client")
        blob.upload_from_string("1", if_generation_match=0)
    assert (emulator.home / "buckets" / "shared" / "from a client").read_text() == "1"
    path = f"storage/v1/b/shared/o/{quote('from a client')}"
    assert httpx.get(f"{access.storage}/{path}").status_code == 200
    for url in (access.url, f"{access.url}/storage-x", access.storage[:-1], f"{access.storage}x"):
        assert httpx.get(f"{url}/{path}").status_code == 401
