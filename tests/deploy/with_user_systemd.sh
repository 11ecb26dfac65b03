#!/bin/bash
# Runs a command beside a `systemd --user` of its own, on a Linux machine (as root) that systemd did not boot:
#
#   tests/deploy/with_user_systemd.sh python benchmarks/deploy_live.py --manager systemd
#
# Everything is in a mount namespace and a control group of its own; both are gone at the end. Exit code 77: it cannot run here.
set -u
if [ "${1:-}" != "--inside" ]; then
  [ -d /run/systemd/system ] && { echo "systemd runs this machine: use its own user mode" >&2; exit 77; }
  [ "$(id -u)" = 0 ] && command -v unshare >/dev/null && [ -x /usr/lib/systemd/systemd ] ||
    { echo "needs root, unshare and systemd" >&2; exit 77; }
  exec unshare --mount -- bash "$0" --inside "$@"
fi
shift
group=/sys/fs/cgroup/ddtree-user-$$
here=$(mktemp -d)
trap 'kill "${manager:-0}" 2>/dev/null; wait 2>/dev/null; echo 0 >/sys/fs/cgroup/cgroup.procs 2>/dev/null
      find "$group" -depth -type d -exec rmdir {} + 2>/dev/null; rm -rf "$here"' EXIT
mount -t tmpfs none /run && mount -t tmpfs none /sys/fs/cgroup && umount -l /sys/fs/cgroup || exit 77
mountpoint -q /sys/fs/cgroup && umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup && mkdir "$group" && echo 0 >"$group/cgroup.procs" || exit 77
export XDG_RUNTIME_DIR=/run/user/0 XDG_CONFIG_HOME=$here/config XDG_DATA_HOME=$here/data
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" "$XDG_CONFIG_HOME" && chmod 700 "$XDG_RUNTIME_DIR"
/usr/lib/systemd/systemd --user --log-target=console >"$here/log" 2>&1 &
manager=$!
for _ in $(seq 100); do
  systemctl --user is-system-running >/dev/null 2>&1 && break
  kill -0 "$manager" 2>/dev/null || { cat "$here/log" >&2; exit 77; }
  sleep 0.1
done
"$@"
code=$?
systemctl --user exit 2>/dev/null
exit $code
