"""What can be seen of a run: metrics and their writers, flight records, timelines. All read the record of calls."""

from bagua.observe.chakra import write_chakra
from bagua.observe.explain import explain, read_flight_records
from bagua.observe.metrics import metrics
from bagua.observe.straggler import latest_of
from bagua.observe.timeline import clock_offsets, timeline, write_timeline
from bagua.observe.writers import CsvWriter, MetricWriter, PrometheusWriter, TensorBoardWriter, WandbWriter

__all__ = [
    "CsvWriter",
    "MetricWriter",
    "PrometheusWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "clock_offsets",
    "explain",
    "latest_of",
    "metrics",
    "read_flight_records",
    "timeline",
    "write_chakra",
    "write_timeline",
]
