"""The command ``bagua islands``: what islands have left in a bucket."""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence

from bagua.comm import ObjectBucket, bucket_of, open_store
from bagua.errors import ConfigurationError

#: Names that islands give to objects. Nothing else in the bucket is touched.
_OURS = re.compile(r"(objects|probe)/.+|.*\.cell")
#: Records that islands overwrite as long as they live.
_RECORD = re.compile(r"(.*/)?islands/.+/record/\d+(/\d+)?\.cell")
#: Seconds in which a living island overwrites its record, in a folder and in a bucket.
_FOLDER_S, _BUCKET_S = 2.0, 10.0
#: How long to try to reach the bucket, in seconds.
_REACH_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Delete what runs have left in a bucket.

    Args:
        arguments: words that follow ``bagua islands``.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="bagua islands",
        description="Delete what islands have left in a bucket: cells, records and contributions of all runs at URL.",
        epilog="It waits for some seconds, and refuses if an island that lives overwrites its record meanwhile.",
    )
    parser.add_argument("what", choices=["clean"], help="what to do")
    parser.add_argument("url", metavar="URL", help="address that was given to join_islands, as s3://bucket/run")
    parser.add_argument("--force", action="store_true", help="do not look whether an island lives")
    parsed = parser.parse_args(arguments)
    bucket = bucket_of(open_store(parsed.url, _REACH_S))
    if bucket is None:
        raise ConfigurationError(
            "this store keeps nothing when its servers end", argument="URL", expected="a bucket", seen=parsed.url
        )
    alive = [] if parsed.force else _alive(bucket)
    if alive:
        print(f"bagua islands: a run is alive at {parsed.url}: {'; '.join(alive)}", file=sys.stderr)
        return 1
    found = {name: size for name, (size, _) in bucket.list().items() if _OURS.fullmatch(name)}
    bucket.delete(found)
    print(f"Deleted {len(found)} objects with {sum(found.values()) / 1e6:.1f} MB at {parsed.url}.")
    return 0


def _alive(bucket: ObjectBucket) -> list[str]:
    """Who overwrites its record within some seconds, in the words of the record."""
    before = bucket.list()
    records = [name for name in before if _RECORD.fullmatch(name)]
    if records:
        time.sleep(_FOLDER_S if bucket.is_folder else _BUCKET_S)
    after = bucket.list()
    changed = [name for name in records if name in after and after[name] != before[name]]
    contents = [json.loads(bucket.get(name) or b"{}") for name in changed]
    return [str(record.get("host") or "an island") for record in contents if not record.get("left")]
