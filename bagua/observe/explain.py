"""What flight records say, in sentences: which rank did something else than the others, or where it stands."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Never

from bagua.errors import ConfigurationError
from bagua.observe.flight import PREFIX, later_name
from bagua.observe.folders import folder_of_latest_job, other_jobs

Record = dict[str, Any]
_FILES = f"{PREFIX}*"
#: A group in the records: its label and its global ranks.
_Group = tuple[str, tuple[int, ...]]


class _PlainUnpickler(pickle.Unpickler):
    """Takes numbers, strings, lists and dictionaries; a file that wants to run code is refused."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_flight_records(folder: str | os.PathLike[str]) -> dict[int, Record]:
    """The flight records of one job, by global rank.

    Args:
        folder: folder that ``BAGUA_FLIGHT_DIR`` named, for the job that has written last; or the folder of a job.

    Raises:
        ConfigurationError: there are none, or one of them is no flight record of ours.
    """
    found = folder_of_latest_job(folder, _FILES).glob(_FILES)
    paths = sorted(path for path in found if path.name.removeprefix(PREFIX).isdigit())
    if not paths:
        raise ConfigurationError(
            "there is no flight record here",
            argument="folder",
            expected=f"files {PREFIX}0, {PREFIX}1, ...",
            seen=str(folder),
            advice="Start the job with BAGUA_FLIGHT_DIR=DIR. Ranks write there when a call fails, or on SIGUSR2.",
        )
    records = [_read(path) for path in paths]
    return {int(record["rank"]): record for record in records}


def _read(path: Path) -> Record:
    try:
        record: Record = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        record["calls"], record["rank"], record["ranks"]
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(
            f"this is no flight record of bagua: {error}",
            argument="folder",
            expected="files that bagua has written",
            seen=str(path),
        ) from error
    return record


def explain(folder: str | os.PathLike[str]) -> list[str]:
    """What went wrong, as far as the flight records in ``folder`` tell it.

    Args:
        folder: folder that ``BAGUA_FLIGHT_DIR`` named, for the job that has written last; or the folder of a job. It
            holds the files of all ranks.

    Returns:
        Sentences, the likeliest cause first.

    Raises:
        ConfigurationError: there is no flight record, or it cannot be read.
    """
    records = read_flight_records(folder)
    groups = _groups(records)
    sentences = [sentence for group in groups for sentence in _disagreements(group, groups[group])]
    sentences += [sentence for group in groups for sentence in _absences(group, groups[group], records)]
    sentences += _silent(records)
    sentences += _messages(records)
    if not sentences:
        sentences = ["All ranks made the same calls, and none was under way."]
    sentences += [f"Rank {rank} wrote its record because: {_first_line(one)}" for rank, one in records.items()]
    return sentences + _elsewhere(Path(folder), records)


def _elsewhere(folder: Path, records: Mapping[int, Record]) -> list[str]:
    """What is not told here, and where it is."""
    latest = folder_of_latest_job(folder, _FILES)
    later = [rank for rank in records if (latest / later_name(rank)).exists()]
    sentences = [f"Rank {rank} wrote again after its first failure: {latest / later_name(rank)}" for rank in later]
    others = [] if latest == folder else other_jobs(folder, latest, _FILES)
    if others:
        what = "is another job" if len(others) == 1 else f"are {len(others)} other jobs"
        sentences.append(f"All this is of {latest}. In {folder} there {what}: {', '.join(others[-4:])}.")
    return sentences


def _first_line(record: Record) -> str:
    return str(record["reason"]).partition("\n")[0]


def _groups(records: Mapping[int, Record]) -> dict[_Group, dict[int, dict[int, Record]]]:
    """By group and rank its collectives, by their number."""
    groups: dict[_Group, dict[int, dict[int, Record]]] = {}
    for rank, record in records.items():
        for call in record["calls"]:
            if call["kind"] not in ("send", "recv", "sendrecv"):
                of_group = groups.setdefault((call["label"], tuple(call["ranks"])), {})
                of_group.setdefault(rank, {})[call["sequence"]] = call
    return groups


def _disagreements(group: _Group, calls: dict[int, dict[int, Record]]) -> Iterator[str]:
    """The first call that is not the same on all ranks."""
    common = set.intersection(*(set(of_rank) for of_rank in calls.values()))
    for sequence in sorted(common):
        by_agreement: dict[tuple[str, ...], list[int]] = {}
        for rank, of_rank in calls.items():
            by_agreement.setdefault(tuple(of_rank[sequence]["agreement"]), []).append(rank)
        if len(by_agreement) > 1:
            yield _disagreement(group[0], sequence, list(by_agreement.values()), calls)
            return


def _disagreement(label: str, sequence: int, sides: list[list[int]], calls: dict[int, dict[int, Record]]) -> str:
    sides.sort(key=len)
    does = [f"{_ranks(side)} {'does' if len(side) == 1 else 'do'} {_what(calls[side[0]][sequence])}" for side in sides]
    return f"In call #{sequence} on {label}, {', '.join(does[:-1])}, while {does[-1]}."


def _what(call: Record) -> str:
    return str(call["text"]).partition(" ")[2]


def _absences(group: _Group, calls: dict[int, dict[int, Record]], records: Mapping[int, Record]) -> Iterator[str]:
    """The first call to which some ranks have not come, or came when the others had given up."""
    label, members = group
    open_calls = [
        sequence
        for of_rank in calls.values()
        for sequence, call in of_rank.items()
        if call["state"] in ("started", "failed")
    ]
    if not open_calls:
        return
    sequence = min(open_calls)
    # By the records: between islands a member has another number in the next epoch than the one it signs with.
    here = sorted(rank for rank, of_rank in calls.items() if _stands_in(of_rank, sequence))
    absent = [rank for rank in members if rank in records and rank not in here and not _is_past(calls, rank, sequence)]
    begun_s = min(calls[rank][sequence]["begun_s"] for rank in here)
    # A rank that had written its record before may have come all the same.
    unknown = [rank for rank in absent if records[rank]["written_s"] < begun_s]
    missing = [rank for rank in absent if rank not in unknown]
    what = _what(calls[here[0]][sequence])
    if missing:
        yield f"{_ranks(here)} came to call #{sequence} on {label}, {what}, and {_ranks(missing)} did not."
    for rank in missing:
        yield _position(rank, label, calls.get(rank, {}), sequence, records[rank])
    for rank in unknown:
        yield f"{_ranks(here)} came to call #{sequence} on {label}, {what}. Rank {rank} had written its record before."


def _stands_in(of_rank: Mapping[int, Record], sequence: int) -> bool:
    return sequence in of_rank and of_rank[sequence]["state"] in ("started", "failed")


def _is_past(calls: dict[int, dict[int, Record]], rank: int, sequence: int) -> bool:
    of_rank = calls.get(rank, {})
    found = of_rank.get(sequence)
    return found["state"] == "completed" if found is not None else max(of_rank, default=0) > sequence


def _position(rank: int, label: str, of_rank: Mapping[int, Record], sequence: int, record: Record) -> str:
    before = [call for number, call in of_rank.items() if number < sequence]
    if of_rank.get(sequence, {}).get("state") == "late":
        return f"Rank {rank} came to it when the others had given up."
    last = f"Its last call there was {before[-1]['text']}. " if before else f"It made no call on {label}. "
    frames = record["stacks"].get("main", [])
    return f"{last}When it wrote its record, rank {rank} stood at {_own_frame(frames)}."


def _own_frame(frames: Sequence[str]) -> str:
    """The innermost frame of the user's code."""
    own = [frame for frame in frames if not any(f"/{package}/" in frame for package in ("bagua", "torch"))]
    return (own or list(frames) or ["an unknown place"])[-1]


def _silent(records: Mapping[int, Record]) -> Iterator[str]:
    known = set().union(*(one["ranks"] for one in records.values()))
    missing = sorted(known - set(records))
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        yield f"{_ranks(missing)} {verb} written no record: killed, stopped, or still busy with something else."


def _messages(records: Mapping[int, Record]) -> Iterator[str]:
    """Messages under way."""
    for rank, record in records.items():
        for call in record["calls"]:
            if call["kind"] in ("send", "recv", "sendrecv") and call["state"] in ("started", "failed"):
                yield f"Rank {rank} was in a message on {call['label']}: {call['text']}."


def _ranks(ranks: Sequence[int]) -> str:
    """``Rank 1``, ``Ranks 0 and 2``; many ranks in short."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(shown):
        return f"Ranks {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"Ranks {', '.join(shown[:-1])} and {shown[-1]}"
