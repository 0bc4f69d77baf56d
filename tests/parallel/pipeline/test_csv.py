"""Tables as files: what is written is read again, what torch writes is read, what is no table is named by its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridtron.parallel.pipeline import build_schedule, lower, read_csv, write_csv
from gridtron.parallel.pipeline.build import FAMILIES


@pytest.fixture
def table(tmp_path):
    def write(text, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_again(name, tmp_path):
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, 2, 7):
            schedule = build_schedule(name, ranks, microbatches)
            path = tmp_path / "table.csv"
            write_csv(schedule, path)
            again = read_csv(path)
            assert (again.actions, again.placement) == (schedule.actions, schedule.placement)
            assert again.microbatches == microbatches
            assert build_schedule(str(path), ranks, microbatches) == again
    assert [item.name for item in tmp_path.iterdir()] == ["table.csv"]


def test_the_file_is_what_a_person_would_write(tmp_path):
    write_csv(build_schedule("zb_h1", 2, 2), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_idle_steps_and_torchs_pairs(table):
    path = table('﻿0F0,0F1,,,3F0,3B0, 0B0 ,(3F1;3B1)OVERLAP_F_B,0B1,\r\n,1F0,2F0,1F1,2F1,,"2B0",1B0,2B1,1B1\r\n,,\r\n')
    schedule = read_csv(path)
    assert schedule.placement == (0, 1, 1, 0)
    assert [str(action) for action in schedule.actions[0]] == ["0F0", "0F1", "3F0", "3B0", "0B0", "3F1", "3B1", "0B1"]
    lower(schedule.validate()).validate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0,0B0", "'0SEND_F0' in row 1, column 2 .* derived here"),
        ("0F0,0B0\n1RECV_B0", "'1RECV_B0' in row 2, column 1 .* derived here"),
        ("0UNSHARD,0F0,0B0", "'0UNSHARD' in row 1, column 1 .* derived here"),
        ("0F0,0X0", r"'0X0' in row 1, column 2 .* is no action; one reads as 2F0"),
        ("0F0,(0B0)OVERLAP_F_B", r"'\(0B0\)OVERLAP_F_B' in row 1, column 2 .* is no action"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B", "0SEND_F0.* in row 1, column 2 .* is no action"),
        ("0F0,0F-1", "'0F-1' in row 1, column 2 .* is no action"),
        ("0F0,٠F٠", "row 1, column 2"),
        ("0F0,1F0,1B0,0B0\n1F1,1B1", "1F1 in row 2, column 1 .* stage 1 lies on the rank of row 1, column 2"),
        ("0F0,0B0\n2F0,2B0", "stages to 2 and has no forward of stage 1; add 1F0"),
        ("0F0,0B0,0F99999999999,0B99999999999", "microbatches to 99999999999, but has no cell 0F1"),
        ("0F0,0B0,1B0\n", "stages to 1 and has no forward of stage 1; add 1F0"),
        ("0F0,0B0\n,\n1F0,1B0", "row 2 .* has no action"),
        ("", "is empty"),
        ("\n,,\n", "is empty"),
        (b"\xff\xfe\x00", "it is not text"),
        ("0F" + "9" * 5000, "row 1, column 1"),
        ("0F0,\x000B0", "row 1, column 2"),
    ],
)
def test_bad_cells_are_named_by_their_place(table, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_csv(table(text))
    assert str(caught.value).count("\n") < 11


def test_a_file_for_other_numbers(table, tmp_path):
    path = str(table("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))
    assert build_schedule(path, 2, 2, 1).name == path
    with pytest.raises(ValueError, match=r"microbatches=8 with the schedule .* a table for microbatches=2"):
        build_schedule(path, 2, 8)
    with pytest.raises(ValueError, match=r"ranks=3, chunks=2 with the schedule .* a table for ranks=2, chunks=1"):
        build_schedule(path, 3, 2, 2)
    with pytest.raises(ValueError, match=r"gone\.csv cannot be read: No such file"):
        read_csv(tmp_path / "gone.csv")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_csv(tmp_path)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="012FBIW;(),\n OVERLAP_-SEND\"'", max_size=60))
def test_any_text_is_a_table_or_a_short_message(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text)
    try:
        read_csv(path).validate()
    except ValueError as error:
        assert str(error).count("\n") < 11
