"""prepare's output: one row per assistant turn, in two parquet files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .files import publish, temporary_path

if TYPE_CHECKING:
    from typing_extensions import Self

SPLITS = ("train", "heldout")
_BATCH = 1000  # rows per parquet row group


@dataclass(frozen=True)
class Row:
    """Rendered prompt (with generation prompt) + the target's own ids.

    Loss_mask is 1 on what the head has to learn.
    """

    row_id: str  # "<conversation id>/<assistant turn index>"
    conversation_id: str
    turn: int
    input_ids: list[int]
    prompt_length: int
    loss_mask: list[int]
    source: str  # "regenerated" | "original"


def row_schema() -> Any:
    """The parquet schema of the rows."""
    import pyarrow as pa

    return pa.schema(
        {
            "row_id": pa.string(),
            "conversation_id": pa.string(),
            "turn": pa.int32(),
            "input_ids": pa.list_(pa.int32()),
            "prompt_length": pa.int32(),
            "loss_mask": pa.list_(pa.uint8()),
            "source": pa.string(),
        }
    )


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one parquet file, in order, a row group in memory at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH):
            for item in batch.to_pylist():
                yield Row(**item)


def count_rows(path: Path) -> int:
    """Rows in a parquet file, from its footer alone."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


class RowWriter:
    """Writes train.parquet and heldout.parquet beside their final names; a clean exit publishes both."""

    def __init__(self, directory: Path) -> None:
        import pyarrow.parquet as pq

        directory.mkdir(parents=True, exist_ok=True)
        self._paths = {split: directory / f"{split}.parquet" for split in SPLITS}
        self._writers = {
            split: pq.ParquetWriter(temporary_path(path), row_schema()) for split, path in self._paths.items()
        }
        self._rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
        self.counts = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, row: Row) -> None:
        """Append a row to "train" or "heldout"."""
        self._rows[split].append(row)
        self.counts[split] += 1
        if len(self._rows[split]) >= _BATCH:
            self._flush(split)

    def written(self, split: str) -> Iterator[Row]:
        """What is written of a split, which takes no more rows after this."""
        self._close(split)
        return read_rows(temporary_path(self._paths[split]))

    def keep(self, split: str, chosen: Callable[[Row], bool]) -> None:
        """Drop the other rows of a split, which takes no more rows after this."""
        import pyarrow.parquet as pq

        rows = self.written(split)
        old = temporary_path(self._paths[split])
        new = old.with_name(f"{old.name}.kept")
        self._writers[split] = pq.ParquetWriter(new, row_schema())
        self.counts[split] = 0
        try:
            for row in rows:
                if chosen(row):
                    self.add(split, row)
            self._close(split)
            new.replace(old)
        finally:
            new.unlink(missing_ok=True)

    def _close(self, split: str) -> None:
        if self._writers[split].is_open:
            self._flush(split)
            self._writers[split].close()

    def _flush(self, split: str) -> None:
        import pyarrow as pa

        table = pa.Table.from_pylist([asdict(row) for row in self._rows[split]], schema=row_schema())
        self._writers[split].write_table(table)
        self._rows[split] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for split, writer in self._writers.items():
                if kind is None:
                    self._close(split)
                elif writer.is_open:
                    writer.close()
            if kind is None:
                for path in self._paths.values():
                    publish(temporary_path(path), path)
        finally:
            for path in self._paths.values():
                temporary_path(path).unlink(missing_ok=True)
