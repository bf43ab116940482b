"""What nsys starts in place of a program: has the test at the given socket run it, and ends as it did."""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    with connection.makefile("rw") as stream:
        stream.write(json.dumps(dict(os.environ)) + "\n")
        stream.flush()
        answer = json.loads(stream.readline())
sys.stdout.write(answer["stdout"])
sys.stderr.write(answer["stderr"])
sys.stdout.flush()
if answer["returncode"] < 0:
    signal.signal(-answer["returncode"], signal.SIG_DFL)
    os.kill(os.getpid(), -answer["returncode"])
sys.exit(answer["returncode"])
