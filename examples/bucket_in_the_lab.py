"""Train through a bucket on hosts that let no connection in.

On Linux, as root, with the extra `bucket`, the package `moto[server]` from
PyPI, and `nftables` from the system:

bagua lab --hosts 3 --link 50mbit,20ms -- examples/bucket_in_the_lab.py

Host 0 serves S3, as moto does for tests. Each other host is an island. Its
packet filter drops all connections that come in, as a home router does.
"""

import datetime as dt
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch.distributed as dist

rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
head, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
DAY = dt.timedelta(days=1)
CLOSED = """
add table ip lab
add chain ip lab input { type filter hook input priority 0; }
add rule ip lab input iifname lab0 tcp flags & (syn|ack) == syn drop
"""
notes = dist.TCPStore(head, port, is_master=rank == 0, timeout=DAY)


def try_others() -> None:
    """Connect to each island, when all are closed, and say what came of it."""
    while notes.add("closed", 0) < last:
        time.sleep(0.1)
    for other in {*range(1, last + 1)} - {rank}:
        try:
            socket.create_connection((f"10.77.0.{other + 1}", 5000), 5).close()
            print(f"from host {rank} to host {other}: connected")
        except OSError as error:
            print(f"from host {rank} to host {other}: {error}")


if rank == 0:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel("ERROR")  # not a line a request
    server = ThreadedMotoServer(head, 0, verbose=False)
    server.start()
    endpoint = f"http://{head}:{server.get_host_and_port()[1]}"
    bucket = urllib.request.Request(f"{endpoint}/lab", method="PUT")
    urllib.request.urlopen(bucket).close()
    notes.set("endpoint", endpoint)
    try_others()
    notes.wait([f"island {number} has ended" for number in range(1, last + 1)])
else:
    subprocess.run(["nft", "-f", "-"], input=CLOSED, text=True, check=True)
    listening = socket.create_server(("", 5000))
    notes.add("closed", 1)
    try_others()
    os.environ |= {
        "AWS_ENDPOINT_URL": notes.get("endpoint").decode(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
    }
    script = Path(__file__).with_name("through_a_bucket.py")
    options = ["s3://lab/run", "--islands", str(last), *sys.argv[1:]]
    subprocess.run([sys.executable, script, *options], check=True)
    notes.set(f"island {rank} has ended", "")
