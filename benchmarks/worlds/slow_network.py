"""A slow network between processes of one machine: a shared object that makes their TCP sends take as long as a link's.

    LD_PRELOAD=$(python benchmarks/worlds/slow_network.py FOLDER) SLOW_BYTES_PER_SECOND=12.5e6 SLOW_SECONDS=1e-3 COMMAND

Every send of a TCP socket is followed by a pause of its bytes over the rate, and of the latency where it is more than a
packet's head. Pauses are those of the thread that sends, so links of one process take turns, as on one adapter. It
needs a C compiler. It emulates no loss, no congestion and no receiving side.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAD_BYTES = 64  # messages up to this size are headers, which travel with what follows
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

static double rate, latency;

__attribute__((constructor)) static void start(void) {
  const char *bytes = getenv("SLOW_BYTES_PER_SECOND"), *seconds = getenv("SLOW_SECONDS");
  rate = bytes ? atof(bytes) : 0;
  latency = seconds ? atof(seconds) : 0;
}

static int is_tcp(int fd) {
  int type = 0, domain = 0;
  socklen_t size = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM) return 0;
  size = sizeof domain;
  return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && (domain == AF_INET || domain == AF_INET6);
}

static ssize_t slowed(int fd, ssize_t sent) {
  if (sent > HEAD_BYTES && rate > 0 && is_tcp(fd)) {
    double seconds = sent / rate + latency;
    struct timespec pause = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&pause, 0);
  }
  return sent;
}

typedef ssize_t (*writes)(int, const struct iovec *, int);
typedef ssize_t (*messages)(int, const struct msghdr *, int);
typedef ssize_t (*sends)(int, const void *, size_t, int);

ssize_t writev(int fd, const struct iovec *parts, int count) {
  return slowed(fd, ((writes)dlsym(RTLD_NEXT, "writev"))(fd, parts, count));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  return slowed(fd, ((messages)dlsym(RTLD_NEXT, "sendmsg"))(fd, message, flags));
}

ssize_t send(int fd, const void *bytes, size_t count, int flags) {
  return slowed(fd, ((sends)dlsym(RTLD_NEXT, "send"))(fd, bytes, count, flags));
}
"""


def build(folder: Path) -> Path:
    """Return the shared object, compiled in `folder`. Raises CalledProcessError where it cannot be compiled."""
    source, made = folder / "slow_network.c", folder / "slow_network.so"
    source.write_text(SOURCE.replace("HEAD_BYTES", str(HEAD_BYTES)))
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
