"""Pictures and text of a timeline against the timeline: every action at its place, in its colour, with its number."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.pipeline.draw import draw, plot, summary, terminal, title
from gridtron.parallel.pipeline.picture import Box, Picture
from gridtron.parallel.pipeline.simulate import simulate

SIZES = [(1, 1), (3, 2), (4, 8)]


def timeline_of(name, ranks, microbatches, **costs):
    return simulate(build_schedule(name, ranks, microbatches), **costs)


def cells(picture):
    """Action -> its box."""
    return {box.hint.partition(":")[0]: box for box in picture.boxes if box.hint}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_action_lies_where_and_when_it_runs(name, ranks, microbatches):
    timeline = timeline_of(name, ranks, microbatches, forward=1.0, input_grad=1.5, weight_grad=0.5, send=0.25)
    picture = draw(timeline)
    found = cells(picture)
    events = [event for row in timeline.events for event in row]
    assert len(found) == len(events)
    origin = min(box.x for box in found.values())
    longest = max(event.end for event in events)
    scale = (max(box.x + box.width for box in found.values()) + 1 - origin) / longest
    heights = set()
    for event in events:
        box = found[str(event.action)]
        assert box.x == pytest.approx(origin + event.start * scale)
        # A cell ends a pixel before the next begins.
        assert box.x + box.width == pytest.approx(origin + event.end * scale - 1)
        heights.add((event.rank, box.y))
        assert box.x >= 0 and box.x + box.width <= picture.width and box.y + box.height <= picture.height
    assert len(heights) == ranks and [y for _, y in sorted(heights)] == sorted(y for _, y in heights)


@pytest.mark.parametrize("name", FAMILIES)
def test_colours_tell_kinds_and_shades_chunks(name):
    schedule = build_schedule(name, 4, 8)
    found = cells(draw(simulate(schedule)))
    colours = {}
    for row in schedule.actions:
        for action in row:
            chunk = schedule.stages(schedule.stage_rank(action.stage)).index(action.stage)
            colours.setdefault((action.kind, chunk), set()).add(found[str(action)].fill)
    assert all(len(shades) == 1 for shades in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


def test_numbers_are_written_where_they_fit():
    picture = draw(timeline_of("1f1b", 4, 8))
    numbers = {(label.x, label.y): label.text for label in picture.labels}
    for action, box in cells(picture).items():
        assert numbers[box.x + box.width / 2, box.y + box.height / 2] == action[2:]
    dense = draw(timeline_of("1f1b", 8, 99, input_grad=2.5, weight_grad=2.5))
    assert 6 < min(box.width for box in cells(dense).values()) < 9
    assert len([label for label in dense.labels if label.text == "98"]) == 8, "the wider half of them has a number"


def test_what_is_told_around_the_rows():
    timeline = timeline_of("interleaved_1f1b", 4, 8)
    texts = [label.text for label in draw(timeline).labels]
    assert title(timeline.schedule) == "interleaved_1f1b: 4 ranks, 8 microbatches, 2 stages a rank" in texts
    assert f"bubble {100 * timeline.bubble_fraction:.1f} %" in summary(timeline) and summary(timeline) in texts
    assert "forward, by chunk" in texts and "backward" in texts and "gradient of the weights" not in texts
    assert [f"rank {rank} (stages {rank}, {rank + 4})" in texts for rank in range(4)] == [True] * 4
    assert title(build_schedule("gpipe", 1, 1)) == "gpipe: 1 rank, 1 microbatch"
    assert "gradient of the weights" in [label.text for label in draw(timeline_of("zb_h1", 2, 2)).labels]


def test_svg_and_png_show_the_same(tmp_path):
    timeline = timeline_of("zb_h1", 4, 8)
    picture = draw(timeline)
    plot(timeline, tmp_path / "a.svg")
    timeline.plot(tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}rect")) == len(picture.boxes) + 1
    assert [item.text for item in root.findall(f"{space}text")] == [label.text for label in picture.labels]
    image = Image.open(tmp_path / "a.png")
    assert image.size == (round(2 * picture.width), round(2 * picture.height))
    for box in cells(picture).values():
        # Beside the number, near a corner.
        assert image.getpixel((round(2 * box.x) + 4, round(2 * box.y) + 4)) == box.fill
    drawn = sum(count for count, colour in image.getcolors(1 << 24) if colour == (255, 255, 255))
    assert 0.2 < drawn / (image.size[0] * image.size[1]) < 0.9


def test_text_of_an_svg_is_escaped():
    picture = Picture(10, 10, [Box(0, 0, 1, 1, (0, 0, 0), "<a> & b")])
    assert ElementTree.fromstring(picture.to_svg())[1][0].text == "<a> & b"


def test_a_large_picture_keeps_to_a_size(tmp_path):
    timeline = timeline_of("1f1b", 48, 256)
    plot(timeline, tmp_path / "large.svg")
    assert (tmp_path / "large.svg").stat().st_size < 4e6
    assert b"<title>" not in (tmp_path / "large.svg").read_bytes() and draw(timeline).width < 5600


@pytest.mark.parametrize("name", ["a.pdf", "a", ".svg/"])
def test_other_endings_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"written as \.svg or \.png; nearest: .*\.svg"):
        plot(timeline_of("1f1b", 1, 1), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OSError):
        plot(timeline_of("1f1b", 1, 1), tmp_path / "folder.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


# ---------------------------------------------------------------- the terminal
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_text_has_every_action_in_its_column(name, ranks, microbatches):
    timeline = timeline_of(name, ranks, microbatches)
    lines = terminal(timeline, 250, colour=False).plain.splitlines()
    assert len(lines) == ranks + 1
    margin = lines[0].index("F")
    assert timeline.makespan * 3 <= 220 and microbatches <= 10
    scale, peak = 3, len(str(max(timeline.peak_activations)))
    for line, row in zip(lines, timeline.events, strict=False):
        shown = line[margin : margin + round(timeline.makespan * scale)]
        assert line.endswith(f"peak {timeline.peak_activations[row[0].rank]:>{peak}}")
        busy = sum(round((event.end - event.start) * scale) for event in row)
        assert len(shown) - shown.count("·") == busy
        for event in row:
            place = round(event.start * scale)
            assert shown[place : place + 2].upper() == f"{event.action.kind}{event.action.microbatch}"


def test_colours_of_the_text():
    timeline = timeline_of("zb_h1", 4, 8)
    text = terminal(timeline, 120, colour=True)
    assert "·" not in text.plain and "I0" not in text.plain
    # A span a cell, one a name of the legend.
    assert len([span for span in text.spans if "on rgb" in str(span.style)]) == 4 * 8 * 3 + 3
    assert len({str(span.style) for span in text.spans if "on rgb" in str(span.style)}) == 3


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_narrow_terminals(width):
    lines = terminal(timeline_of("interleaved_1f1b", 8, 64), width, colour=False).plain.splitlines()[:-1]
    bound = max(width, 20 + len("rank 7 (stages 7, 15)   peak 99"))
    assert len(lines) == 8 and all(len(line) <= bound for line in lines)
    assert all({"F", "B", "b"} <= set(line) for line in lines) and any("·" in line for line in lines)
    if width < 300:
        first = lines[0][len("rank 0 (stages 0, 8)  ") :]
        assert first[0] == "F" and first.rstrip("peak 0123456789")[-1] == "B" and "F0" not in first


def test_needs_no_heavy_library_before_it_draws():
    code = "import sys, gridtron.parallel.pipeline.draw; print([*{'torch', 'PIL', 'rich'} & set(sys.modules)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
