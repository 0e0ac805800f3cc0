"""A data frame and one text in a Parquet file, by fastparquet: pyarrow is 178 MB, this is 17 MB.

Columns of lists are JSON in the file, a logical type of Parquet that other readers show as text;
real lists, as pyarrow writes them, are read too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_KEY = "codesign"  # of the text in the file's metadata
_CODEC = "ZSTD"  # files as small as pyarrow's, without its dictionaries


def write(path: Path, frame: pd.DataFrame, text: str) -> None:
    """Write the rows, without their index, and the text.

    Raises:
        OSError: If the path cannot be written.
    """
    import fastparquet

    lists = {
        str(name): list(map(_as_list, column))
        for name, column in frame.items()
        if _is_lists(column)
    }
    with path.open("wb") as file:
        fastparquet.write(
            file,
            frame.assign(**lists),
            write_index=False,
            compression=_CODEC,
            custom_metadata={_KEY: text},
        )


def read(path: Path) -> tuple[pd.DataFrame, str]:
    """Return the rows and the text, "" if the file has none.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If it is not a Parquet file, or a damaged one.
    """
    import fastparquet
    import pandas as pd

    with path.open("rb") as file:
        try:
            rows = fastparquet.ParquetFile(file, verify=True)
            frame, text = rows.to_pandas(), rows.key_value_metadata.get(_KEY, "")
        except Exception as err:  # a damaged file fails wherever its first wrong byte is met
            raise ValueError(f"{type(err).__name__}: {err}") from err
    # Texts get the type that pandas gives them, whether fastparquet found pyarrow or not.
    objects = [name for name in frame if frame[name].dtype == object]
    return frame.assign(**{name: pd.Series(frame[name].tolist()) for name in objects}), text


def _is_lists(column: pd.Series) -> bool:
    return len(column) > 0 and isinstance(column.iloc[0], list | tuple | np.ndarray)


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
