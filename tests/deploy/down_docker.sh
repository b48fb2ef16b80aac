#!/usr/bin/env bash
# End the daemon that bring_up_docker.sh started (by its pid file; no other one), and with --purge its images too.
set -euo pipefail

state=${INFERBUS_DOCKER_STATE:-/var/tmp/inferbus-docker}
pidfile=$state/dockerd.pid

say() { printf 'down_docker: %s\n' "$*" >&2; }

if [[ -s $pidfile ]] && pid=$(<"$pidfile") && [[ $(ps -o comm= -p "$pid") == dockerd ]]; then
    # A daemon that hangs is ended all the same.
    mapfile -t running < <(timeout 30 docker ps --quiet)
    ((${#running[@]})) && timeout 120 docker stop --time 60 "${running[@]}" >/dev/null || true
    kill "$pid"
    for ((tries = 0; tries < 120; tries++)); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    if kill -0 "$pid" 2>/dev/null; then
        say "dockerd ($pid) did not stop within a minute; killing it and what it runs"
        mapfile -t below < <(pgrep -f -- "$state/exec/containerd/")
        kill -KILL "$pid" "${below[@]}"
    fi
    say "dockerd ended"
else
    say "no daemon of ours is running"
fi

if [[ ${1:-} == --purge ]]; then
    # Network namespaces stay mounted, and after a crash file systems too; the innermost first.
    awk -v below="$state/" 'index($2, below) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount
    rm -rf "$state"
    say "removed $state"
fi
