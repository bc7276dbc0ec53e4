"""The picture and the trace of an estimate: positions of the events, and their sums."""

from __future__ import annotations

import gzip
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import UserError
from drumline.inspect.canvas import text_width
from drumline.inspect.cost.kernels import Cost
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.cost.memory import Memory
from drumline.inspect.cost.timeline import COPIES, DEVICE, Timeline, TimelineEvent
from drumline.inspect.estimate import BOUNDS, Estimate
from drumline.inspect.hlo.source import SourceLocation
from drumline.inspect.lanes import find_lanes, find_waits, flatten_calls
from drumline.inspect.picture import (
    DEVICE_HEIGHT,
    LEFT,
    LINK_HEIGHT,
    RIGHT,
    WAIT_COLOUR,
    WIDTH,
    Colours,
    axis_ticks,
    longest_loops,
)

MS = 1e-3
BOTH = "ici X up+ici X down"


def device_event(
    start: float, end: float, kind: str = "matmul", make_timeline: int = 7
) -> TimelineEvent:
    cost = Cost(kind, end - start, "compute", flops=3e9, bytes=2e6)
    return TimelineEvent(
        f"{kind}.{make_timeline}",
        kind,
        DEVICE,
        start,
        end,
        SourceLocation(f"src/model.py:{make_timeline}"),
        cost,
    )


def collective_event(
    start: float, end: float, exposed: float = 0.0, kind: str = "all-gather", resource: str = BOTH
) -> TimelineEvent:
    location, cost = (
        SourceLocation("src/model.py:9", "jit(f)/attention/gather"),
        Cost(kind, bytes=1e6),
    )
    return TimelineEvent(f"{kind}.1", kind, resource, start, end, location, cost, ("X",), exposed)


def loop_event(start: float, iterations: int, body: Timeline, kind: str = "loop") -> TimelineEvent:
    end = start + iterations * body.seconds
    location = SourceLocation("src/model.py:3", "jit(f)/while")
    return TimelineEvent(
        "while.1", kind, DEVICE, start, end, location, body=body, trip_count=iterations
    )


def make_timeline(*events: TimelineEvent) -> Timeline:
    return Timeline(tuple(events), max((event.end for event in events), default=0.0))


def make_estimate(timeline: Timeline) -> Estimate:
    busy_seconds: dict[str, float] = {}
    for event, times in timeline.leaf_events():
        for resource in event.resource.split("+"):
            busy_seconds[resource] = busy_seconds.get(resource, 0.0) + event.seconds * times
    return Estimate(
        name="train",
        on="v5litepod-8",
        mesh={"X": 8},
        compiled_by="nobody",
        seconds=timeline.seconds,
        bounds=dict.fromkeys(BOUNDS, 0.0),
        busy=busy_seconds,
        flops=0.0,
        model_flops=0.0,
        mfu=0.5,
        memory=Memory(0, 0, 0),
        memory_limit=1.0,
        communication=(),
        operations=(),
        axis_links={},
        timeline=timeline,
        machine=parse_machine("v5litepod-8"),
    )


# The device computes for 4 ms, waits for 2 of a collective's 3 ms and computes for 4 more.
WAITING_LINE = make_timeline(
    device_event(0, 4 * MS),
    collective_event(3 * MS, 6 * MS, 2 * MS),
    device_event(6 * MS, 10 * MS, "elementwise"),
)
ITERATION = make_timeline(
    device_event(0, 1 * MS),
    collective_event(0.5 * MS, 2 * MS, 1 * MS),
    device_event(2 * MS, 3 * MS),
)
LOOPED = make_timeline(
    device_event(0, 2 * MS), loop_event(2 * MS, 1000, ITERATION), device_event(3.002, 3.004)
)


class TestShownEvents:
    def test_both_directions_of_a_link_share_a_lane_if_always_busy_together(self) -> None:
        assert [lane.name for lane in find_lanes(WAITING_LINE)] == ["computing", "links X"]

    def test_both_directions_have_two_lanes_if_one_is_busy_alone(self) -> None:
        timeline = make_timeline(
            collective_event(0, 1),
            collective_event(1, 2, resource="ici X down"),
            collective_event(2, 3, resource="dcn"),
        )
        names = [lane.name for lane in find_lanes(timeline)]
        assert names == ["computing", "links X, up", "links X, down", "DCN"]

    def test_the_lanes_of_operations_in_loops_are_shown_too(self) -> None:
        assert [lane.name for lane in find_lanes(LOOPED)] == ["computing", "links X"]

    def test_the_device_waits_while_only_a_collective_runs(self) -> None:
        (wait,) = find_waits(WAITING_LINE.events, WAITING_LINE.seconds)
        assert (wait.start, wait.end, wait.event.kind) == (4 * MS, 6 * MS, "all-gather")

    def test_a_gap_is_assigned_to_collectives_once_and_then_to_copies(self) -> None:
        copy = replace(device_event(0, 9, "copy-start"), resource=COPIES)
        events = [
            device_event(0, 1),
            collective_event(1, 4),
            collective_event(2, 3, resource="dcn"),
            copy,
            device_event(9, 10),
        ]
        waits = find_waits(events, 10)
        assert sum(wait.seconds for wait in waits if wait.on_network) == 3
        assert sum(wait.seconds for wait in waits if not wait.on_network) == 5

    def test_the_device_waits_for_the_first_of_two_collectives_first(self) -> None:
        events = [
            device_event(0, 1),
            collective_event(0, 4),
            collective_event(0.5, 3, resource="dcn", kind="all-reduce"),
        ]
        waits = [(wait.event.kind, wait.start, wait.end) for wait in find_waits(events, 4)]
        assert waits == [("all-reduce", 1, 3), ("all-gather", 3, 4)]

    def test_a_computation_called_once_is_shown_in_its_caller(self) -> None:
        called_body = make_timeline(device_event(0, 2), collective_event(1, 3))
        timeline = make_timeline(device_event(0, 5), loop_event(5, 1, called_body, "call"))
        assert [(e.kind, e.start) for e in flatten_calls(timeline)] == [
            ("matmul", 0),
            ("matmul", 5),
            ("all-gather", 6),
        ]

    def test_the_three_longest_loops_are_enlarged_in_their_order(self) -> None:
        bodies = [make_timeline(device_event(0, seconds)) for seconds in (2.0, 5.0, 1.0, 4.0)]
        events, position = [], 0.0
        for body in bodies:
            events.append(loop_event(position, 10, body))
            position = events[-1].end
        chosen = [event.seconds for event, _ in longest_loops(make_timeline(*events)).values()]
        assert chosen == [20.0, 50.0, 40.0]

    def test_a_loop_within_a_loop_counts_with_all_its_iterations(self) -> None:
        inner = loop_event(0, 32, make_timeline(device_event(0, 1 * MS)))
        ((_, outer_times), (_, inner_times)) = longest_loops(
            make_timeline(loop_event(0, 8, make_timeline(inner)))
        ).values()
        assert (outer_times, inner_times) == (1, 8)

    def test_a_computation_looped_over_at_two_places_is_enlarged_once(self) -> None:
        body = make_timeline(device_event(0, 1 * MS))
        timeline = make_timeline(loop_event(0, 5, body), loop_event(5 * MS, 5, replace(body)))
        ((_, times),) = longest_loops(timeline).values()
        assert times == 2

    def test_ticks_are_round_and_in_the_unit_of_the_whole(self) -> None:
        assert [words for _, words in axis_ticks(311e-6)][:3] == ["0 µs", "50 µs", "100 µs"]
        assert [words for _, words in axis_ticks(3.43)][-1] == "3.0 s"
        for seconds in (1e-9, 7.3e-7, 1e-6, 0.02, 1.0, 5000.0):
            assert 3 <= len(axis_ticks(seconds)) <= 16
            assert axis_ticks(seconds)[-1][0] <= seconds * (1 + 1e-6)

    def test_a_named_kernel_has_its_own_colour(self) -> None:
        plain = device_event(0, 1, "flash_attention")
        named = replace(
            plain, location=SourceLocation("m.py:1", "jit(f)/kernel[flash_attention work=1]/dot")
        )
        assert Colours.from_events([(plain, 1)]).legend_name(plain) == "other operations"
        colours = Colours.from_events([(named, 1), (plain, 1)])
        assert colours.legend_name(plain) == "flash_attention"
        assert len({colours["flash_attention"], colours["matmul"], colours["reduce"]}) == 3

    def test_characters_without_a_glyph_have_the_width_of_their_replacement(self) -> None:
        assert text_width("×32 in 5 µs", 15) == text_width("x32 in 5 us", 15)
        assert text_width("ö", 15) == text_width("o", 15)


def is_near(pixel: tuple[int, ...], colour: str) -> bool:
    """Return True if a pixel has a colour, allowing for the rounding of a palette."""
    expected = [int(colour[position : position + 2], 16) for position in (1, 3, 5)]
    return all(abs(a - b) <= 8 for a, b in zip(pixel[:3], expected, strict=True))


def open_png(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.convert("RGB")


def rows_of(image: Any, x: int, colour: str) -> list[int]:
    return [y for y in range(110, image.height) if is_near(image.getpixel((x, y)), colour)]


class TestPicture:
    @staticmethod
    def x(seconds: float, of: float) -> int:
        return round(LEFT + (RIGHT - LEFT) * seconds / of)

    def test_bars_have_the_position_of_their_time_and_the_colour_of_their_kind(
        self, tmp_path: Path
    ) -> None:
        make_estimate(WAITING_LINE).save_png(tmp_path / "step.png")
        image = open_png(tmp_path / "step.png")
        colours = Colours(())
        assert image.width == WIDTH
        # Check beside the words in the middle of each bar.
        for position, kind in ((1, "matmul"), (7, "elementwise")):
            assert (
                len(rows_of(image, self.x(position * MS, 10 * MS), colours[kind]))
                >= DEVICE_HEIGHT - 4
            )
        assert (
            len(rows_of(image, self.x(3.3 * MS, 10 * MS), colours["all-gather"])) >= LINK_HEIGHT - 4
        )
        assert not rows_of(image, self.x(1 * MS, 10 * MS), colours["all-gather"])
        ends = self.x(4 * MS, 10 * MS)
        assert rows_of(image, ends - 3, colours["matmul"])
        assert not rows_of(image, ends + 3, colours["matmul"])

    def test_the_device_is_hatched_in_red_only_while_it_waits(self, tmp_path: Path) -> None:
        make_estimate(WAITING_LINE).save_png(tmp_path / "step.png")
        image = open_png(tmp_path / "step.png")

        def red_rows(position: float) -> int:
            middle = self.x(position * MS, 10 * MS)
            waits = {
                y for x in range(middle - 4, middle + 5) for y in rows_of(image, x, WAIT_COLOUR)
            }
            return len(waits)

        assert red_rows(4.3) >= DEVICE_HEIGHT - 4
        assert red_rows(2) == red_rows(8) == 0

    def test_a_loop_is_one_frame_and_one_iteration_of_it_is_enlarged(self, tmp_path: Path) -> None:
        make_estimate(WAITING_LINE).save_png(tmp_path / "plain.png")
        make_estimate(LOOPED).save_png(tmp_path / "looped.png")
        plain, looped = open_png(tmp_path / "plain.png"), open_png(tmp_path / "looped.png")
        assert looped.height > plain.height + DEVICE_HEIGHT + LINK_HEIGHT
        # In the frame a third of the iteration is red and two thirds are matmuls. In the iteration
        # below, the device computes first.
        computing = rows_of(looped, self.x(0.1, 1.0), Colours(())["matmul"])
        assert len(computing) == pytest.approx(DEVICE_HEIGHT * (2 / 3 + 1), abs=6)

    def test_a_program_that_does_nothing_is_drawn(self, tmp_path: Path) -> None:
        make_estimate(make_timeline()).save_png(tmp_path / "nothing.png")
        assert open_png(tmp_path / "nothing.png").width == WIDTH

    def test_ten_thousand_events_are_drawn(self, tmp_path: Path) -> None:
        events = [
            device_event(position, position + 1, ("matmul", "reduce")[position % 2])
            for position in range(10_000)
        ]
        make_estimate(make_timeline(*events)).save_png(tmp_path / "many.png")
        assert (tmp_path / "many.png").stat().st_size < 200_000

    def test_without_pillow_the_error_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(UserError, match=r"pip install 'drumline\[inspect\]'"):
            make_estimate(make_timeline()).save_png(tmp_path / "nothing.png")

    def test_another_ending_is_a_user_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"drawn as PNG; name it step\.png"):
            make_estimate(make_timeline()).save_png(tmp_path / "step.svg")


def save_and_read(timeline: Timeline, path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the whole trace, and the slices of each track by its name."""
    make_estimate(timeline).save_trace(path)
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks: dict[str, list[Any]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    return trace, tracks


def assert_nested(slices: list[Any]) -> None:
    ends: list[float] = []
    for event_slice in sorted(
        slices, key=lambda event_slice: (event_slice["ts"], -event_slice["dur"])
    ):
        end = round(event_slice["ts"] + event_slice["dur"], 3)
        while ends and ends[-1] <= event_slice["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], event_slice
        ends.append(end)


def busy_seconds(slices: list[Any]) -> float:
    """Return the seconds of a track, including the iterations that are not written separately."""
    alone = sum(
        event_slice["dur"]
        for event_slice in slices
        if event_slice["cat"] in ("operation", "collective")
    )
    return (
        float(alone + sum(event_slice["args"].get("busy_us", 0.0) for event_slice in slices)) / 1e6
    )


class TestTrace:
    def test_each_resource_is_a_track_of_the_programs_process(self, tmp_path: Path) -> None:
        trace, tracks = save_and_read(WAITING_LINE, tmp_path / "step.json")
        process = next(e for e in trace["traceEvents"] if e["name"] == "process_name")
        assert process["args"]["name"] == "train on v5litepod-8 (X=8)"
        assert list(tracks) == ["computing", "links X, up", "links X, down"]
        (slice_up,) = tracks["links X, up"]
        assert (slice_up["ts"], slice_up["dur"]) == (3000, 3000)
        assert slice_up["name"] == "all-gather model.py:9"
        assert slice_up["args"] == {
            "source": "src/model.py:9",
            "scope": "attention",
            "instruction": "all-gather.1",
            "axes": "X",
            "bytes": 1_000_000,
            "exposed": "2 ms",
            "exposed_us": 2000.0,
        }
        product = tracks["computing"][0]["args"]
        assert (product["flops"], product["bound"]) == (3_000_000_000, "compute")

    def test_the_track_of_the_device_names_its_waits(self, tmp_path: Path) -> None:
        _, tracks = save_and_read(WAITING_LINE, tmp_path / "step.json")
        (wait,) = [
            event_slice for event_slice in tracks["computing"] if event_slice["cat"] == "wait"
        ]
        assert wait["name"] == "waits for all-gather at model.py:9"
        assert (wait["ts"], wait["dur"]) == (4000, 2000)

    def test_the_counter_ends_at_all_that_is_exposed(self, tmp_path: Path) -> None:
        trace, _ = save_and_read(LOOPED, tmp_path / "step.json")
        points = [(e["ts"], e["args"]["ms"]) for e in trace["traceEvents"] if e["ph"] == "C"]
        assert points == sorted(points)
        assert points[0] == (0, 0)
        assert points[-1][1] == pytest.approx(1000)

    def test_a_thousand_iterations_are_one_written_out_and_one_slice(self, tmp_path: Path) -> None:
        _, tracks = save_and_read(LOOPED, tmp_path / "step.json")
        names = [event_slice["name"] for event_slice in tracks["computing"]]
        assert names.count("loop ×1000 model.py:3") == 1
        assert names.count("turn 1") == names.count("turns 2–1000") == 1
        assert (tmp_path / "step.json").stat().st_size < 8000

    def test_slices_nest_and_add_up_to_the_estimate(self, tmp_path: Path) -> None:
        third = make_timeline(device_event(0, MS / 3), collective_event(MS / 7, MS / 2, MS / 6))
        micro = make_timeline(
            device_event(0, MS / 9), loop_event(MS / 9, 7, third), collective_event(0, MS / 9)
        )
        timeline = make_timeline(
            loop_event(0, 3, micro), device_event(3 * micro.seconds, 4 * micro.seconds)
        )
        _, tracks = save_and_read(timeline, tmp_path / "step.json")
        for slices in tracks.values():
            assert_nested(slices)
        expected = make_estimate(timeline).busy
        assert busy_seconds(tracks["computing"]) == pytest.approx(expected[DEVICE], rel=1e-4)
        assert busy_seconds(tracks["links X, up"]) == pytest.approx(expected["ici X up"], rel=1e-4)

    @pytest.mark.parametrize("seed", range(12))
    def test_rounding_to_nanoseconds_crosses_no_slices(self, tmp_path: Path, seed: int) -> None:
        random_source = random.Random(seed)
        timeline = make_timeline(device_event(0, random_source.random() * MS))
        for _ in range(4):
            events, position = [], 0.0
            for _ in range(random_source.randrange(1, 4)):
                events.append(loop_event(position, random_source.randrange(2, 90), timeline))
                position = events[-1].end
                events.append(device_event(position, position + random_source.random() * MS / 3))
                position = events[-1].end
            timeline = make_timeline(*events)
        _, tracks = save_and_read(timeline, tmp_path / "step.json")
        assert list(tracks) == ["computing"]
        assert_nested(tracks["computing"])
        assert busy_seconds(tracks["computing"]) == pytest.approx(timeline.seconds, rel=1e-4)

    def test_a_collective_that_overlaps_with_a_loop_gets_its_own_row(self, tmp_path: Path) -> None:
        timeline = make_timeline(
            device_event(0, 1 * MS), collective_event(0, 2.2 * MS), loop_event(1 * MS, 4, ITERATION)
        )
        _, tracks = save_and_read(timeline, tmp_path / "step.json")
        for slices in tracks.values():
            assert_nested(slices)
        both_rows = tracks["links X, up"] + tracks["links X, up (2)"]
        assert busy_seconds(both_rows) == pytest.approx(
            make_estimate(timeline).busy["ici X up"], rel=1e-4
        )

    def test_a_loop_of_unknown_iterations_is_marked(self, tmp_path: Path) -> None:
        body = replace(make_timeline(device_event(0, MS)), unknown_trip_count=True)
        _, tracks = save_and_read(make_timeline(loop_event(0, 1, body)), tmp_path / "step.json")
        assert tracks["computing"][0]["name"] == "loop ×? model.py:3"
        assert busy_seconds(tracks["computing"]) == pytest.approx(MS)

    def test_a_name_that_ends_in_gz_is_compressed_without_the_time(self, tmp_path: Path) -> None:
        plain, _ = save_and_read(LOOPED, tmp_path / "step.json")
        compressed, _ = save_and_read(LOOPED, tmp_path / "step.json.gz")
        assert plain == compressed
        # The bytes at the position of gzip's timestamp.
        assert (tmp_path / "step.json.gz").read_bytes()[4:8] == bytes(4)

    def test_a_program_that_does_nothing_has_an_empty_track(self, tmp_path: Path) -> None:
        _, tracks = save_and_read(make_timeline(), tmp_path / "nothing.json")
        assert tracks == {"computing": []}


@pytest.mark.parametrize("name", ["step.png", "step.json"])
class TestPathsThatCannotBeWritten:
    @staticmethod
    def save(path: Path) -> str:
        estimate = make_estimate(WAITING_LINE)
        with pytest.raises(UserError) as caught:
            (estimate.save_png if path.suffix == ".png" else estimate.save_trace)(path)
        return str(caught.value)

    def test_a_missing_folder_is_an_error(self, tmp_path: Path, name: str) -> None:
        message = self.save(tmp_path / "nowhere" / name)
        assert (
            message
            == f"{tmp_path}/nowhere/{name}: there is no folder {tmp_path}/nowhere; make it first"
        )

    def test_a_folder_at_the_files_path_is_an_error(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        message = self.save(tmp_path / name)
        assert message.startswith(f"{tmp_path / name}: cannot be written: ")
        assert "\n" not in message
