"""Train through a bucket on hosts of which none reaches another one.

On Linux, as root, with the extra `bucket` and the package `moto[server]`:

bagua lab --hosts 3 --link 50mbit,20ms -- examples/bucket_in_the_lab.py

Host 0 serves S3, as moto does for tests. Each other host is an island. It has
a route to host 0 alone, so islands cannot reach each other.
"""

import datetime as dt
import logging
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import torch.distributed as dist

rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
head, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
DAY = dt.timedelta(days=1)
notes = dist.TCPStore(head, port, is_master=rank == 0, timeout=DAY)

if rank == 0:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel("ERROR")  # not a line a request
    server = ThreadedMotoServer(head, 0, verbose=False)
    server.start()
    endpoint = f"http://{head}:{server.get_host_and_port()[1]}"
    bucket = urllib.request.Request(f"{endpoint}/lab", method="PUT")
    urllib.request.urlopen(bucket).close()
    notes.set("endpoint", endpoint)
    notes.wait([f"island {number} has ended" for number in range(1, last + 1)])
else:
    for change in ("flush dev lab0", f"add {head} dev lab0"):
        subprocess.run(["ip", "route", *change.split()], check=True)
    for other in {*range(1, last + 1)} - {rank}:
        try:
            socket.create_connection((f"10.77.0.{other + 1}", port), 5)
        except OSError as error:
            print(f"from host {rank} to host {other}: {error.strerror}")
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
