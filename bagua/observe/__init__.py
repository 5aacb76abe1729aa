"""What can be seen of a run: metrics, flight records, timelines. All read the record of calls."""

from bagua.observe.flight import explain, read_flight_records
from bagua.observe.straggler import latest_of
from bagua.observe.timeline import clock_offsets, timeline, write_timeline
from bagua.observe.watch import CsvWriter, metrics

__all__ = [
    "CsvWriter", "clock_offsets", "explain", "latest_of", "metrics", "read_flight_records", "timeline",
    "write_timeline",
]  # fmt: skip
