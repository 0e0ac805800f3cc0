"""Tables of every type that stages write, and files of another writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import codesign
from codesign.artifacts import parquet

SHIPPED = Path(codesign.__file__).parent / "data/fits/smollm2-135m-cpu/fit.acceptance.parquet"


def there_and_back(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    parquet.write(path, frame, "a text")
    found, text = parquet.read(path)
    assert text == "a text"
    return found


def test_numbers_and_texts_keep_their_type_their_values_and_their_gaps(tmp_path):
    frame = pd.DataFrame(
        {
            "count": [1, -2, 2**62],
            "rank": np.array([0, -1, 7], np.int8),
            "seconds": [0.1, np.nan, np.inf],
            "chance": np.array([0.1, 0.2, 0.3], np.float32),
            "beside": [True, False, True],
            "category": ["", "chat", "Stra\N{LATIN SMALL LETTER SHARP S}e"],
            "reason": ["a", None, "b"],
            "number": pd.array([1, None, 3], dtype="Int64"),
            "flag": pd.array([True, None, False], dtype="boolean"),
        }
    )
    pd.testing.assert_frame_equal(there_and_back(frame, tmp_path / "a"), frame)


def test_what_is_missing_in_every_row_is_missing_when_read(tmp_path):
    frame = pd.DataFrame({"finish": [None, None], "first_token": [1.5, None]}, dtype=object)
    found = there_and_back(frame, tmp_path / "a")
    assert found["finish"].isna().all()
    assert found["first_token"].dtype == np.float64
    assert found["first_token"].isna().tolist() == [False, True]


def test_lists_come_back_exactly_whatever_held_them(tmp_path):
    ids = [[1, 2**62], [], [7]]
    log_probs = np.log(np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32))
    frame = pd.DataFrame({"ids": ids, "tuples": [(1,), (2, 3), ()], "log_probs": list(log_probs)})
    found = there_and_back(frame, tmp_path / "a")
    assert found["ids"].tolist() == ids
    assert found["tuples"].tolist() == [[1], [2, 3], []]
    assert (np.array(found["log_probs"].tolist(), np.float32) == log_probs).all()


def test_a_table_without_rows_keeps_its_columns(tmp_path):
    frame = pd.DataFrame({"n": [1], "x": [0.5], "text": ["a"], "ids": [[1]]}).iloc[:0]
    found = there_and_back(frame, tmp_path / "a")
    assert list(found) == list(frame)
    assert (len(found), found["n"].dtype, found["x"].dtype) == (0, np.int64, np.float64)


def test_a_file_of_pyarrow_with_real_lists_is_read():
    assert b"parquet-cpp-arrow" in SHIPPED.read_bytes()  # from before this writer
    frame, text = parquet.read(SHIPPED)
    assert text.startswith('{"kind": "fit"')
    assert (frame["rank"].dtype, frame["request"].dtype) == (np.int8, np.int64)
    assert pd.api.types.is_string_dtype(frame["category"])
    log_probs = np.array(frame["log_probs"].tolist())
    assert log_probs.shape[0] == len(frame) > 1000
    assert (np.diff(log_probs, axis=1) <= 0).all()


@pytest.mark.parametrize("kept", [0, 3, 4, 11, 200, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path, kept):
    path = tmp_path / "a"
    there_and_back(pd.DataFrame({"x": range(100)}), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"ParquetException|OSError"):
        parquet.read(path)
