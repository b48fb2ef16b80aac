"""Settings: where they come from, which wins, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferbus.workers.config import (
    BusSettings,
    ConfigError,
    GatewaySettings,
    Option,
    Settings,
    StreamSettings,
    WorkerSettings,
    hide_userinfo,
    options,
    resolve,
    unknown_variables,
)


def told(
    flags: dict[str, Any] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve(flags or {}, env or {}, file)
    return error.value.problems


def test_without_any_source_there_are_defaults() -> None:
    settings = resolve({}, {})
    assert settings.bus == BusSettings()
    assert settings.streams == StreamSettings()
    assert settings.worker.classes == {"interactive": 4, "batch": 1}


def test_every_worker_has_an_id_of_its_own() -> None:
    assert resolve({}, {}).worker.worker != resolve({}, {}).worker.worker


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "inferbus.toml"
    file.write_text("[worker]\nslots = 1\nack_wait = 10\ngrace = 5.5\n")
    env = {"INFERBUS_SLOTS": "2", "INFERBUS_ACK_WAIT": "20", "OTHER": "x"}
    worker = resolve({"slots": 3, "grace": None}, env, file).worker
    assert (worker.slots, worker.ack_wait, worker.grace) == (3, 20.0, 5.5)


def test_lists_and_weights_can_be_written_in_one_line_or_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "inferbus.toml"
    file.write_text('[nats]\nurl = ["nats://a:1", "nats://b:2"]\n[worker]\nclasses = { batch = 2 }\n')
    settings = resolve({}, {}, file)
    assert settings.bus.urls == ("nats://a:1", "nats://b:2")
    assert settings.worker.classes == {"batch": 2}
    env = {"INFERBUS_NATS_URL": "nats://c:3, d", "INFERBUS_CLASSES": "interactive:9, batch:1"}
    settings = resolve({}, env, file)
    assert settings.bus.urls == ("nats://c:3", "d")
    assert settings.worker.classes == {"interactive": 9, "batch": 1}
    assert resolve({"nats_url": ("nats://e:4",)}, env, file).bus.urls == ("nats://e:4",)
    assert resolve({"nats_url": ()}, env, file).bus.urls == ("nats://c:3", "d")


def test_all_problems_are_told_together_each_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "inferbus.toml"
    file.write_text('[worker]\nslots = -1\nwrong = 1\n[streams]\nreplicas = "x"\n[extra]\na = 1\n')
    problems = told(
        {"ack_wait": "soon", "nats_creds": str(tmp_path / "none")},
        {"INFERBUS_NATS_URL": "http://host", "INFERBUS_CLASSES": "urgent:1"},
        file,
    )
    text = "\n".join(problems)
    for part in (
        f"worker.slots (file {file})",
        f"worker.wrong (file {file}): no such setting",
        f"streams.replicas (file {file})",
        f"extra (file {file}): no such section",
        "worker.ack_wait (flag --ack-wait)",
        "nats.creds (flag --nats-creds): no such file",
        "nats.url (environment INFERBUS_NATS_URL): must be a nats://",
        "worker.classes (environment INFERBUS_CLASSES): knows interactive, batch; not urgent",
    ):
        assert part in text
    assert len(problems) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nats_user": "u"}, "user (flag --nats-user): and password belong together"),
        ({"nats_token": "t", "nats_user": "u", "nats_password": "p"}, "cannot be combined with user"),
        ({"nats_prefix": "a.>"}, "nats.prefix (flag --nats-prefix)"),
        ({"nats_inbox_prefix": "_INBOX.*"}, "nats.inbox_prefix"),
        ({"reply_prefix": ("_INBOX",)}, "end in a dot"),
        ({"reply_prefix": ("$JS.API.",)}, "plain tokens"),
        ({"live_share": 1.5}, "worker.live_share"),
        ({"classes": "batch"}, "name:weight"),
        ({"classes": "batch:0"}, "worker.classes"),
        ({"announce_interval": 60}, "worker.announce_interval"),
        ({"prefill_timeout": 301}, "at most 300"),
        ({"nats_tls_ca": "/none"}, "no such file"),
        ({"max_attempts": 1.5}, "worker.max_attempts"),
        ({"worker": "a\nb"}, "worker.worker (flag --worker): must be printable text"),
        ({"worker": "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 65}, "worker.worker (flag --worker)"),
        ({"served_model": "x" * 129}, "worker.served_model (flag --served-model): a model name"),
    ],
)
def test_what_cannot_be_used_is_named(flags: dict[str, Any], message: str) -> None:
    assert message in "\n".join(told(flags))


def test_certificate_and_key_belong_together(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    assert "tls_key belong together" in told({"nats_tls_cert": tmp_path / "cert.pem"})[0]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "No such file" in told(file=tmp_path / "none.toml")[0]
    (tmp_path / "broken.toml").write_text("[nats\n")
    assert "not valid TOML" in told(file=tmp_path / "broken.toml")[0]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf[worker]\r\nslots = 3\r\n")
    assert resolve({}, {}, tmp_path / "windows.toml").worker.slots == 3


def test_bytes_that_are_no_text_are_a_problem_and_no_traceback() -> None:
    assert "nats.user (environment INFERBUS_NATS_USER): must be UTF-8 text" in told(
        env={"INFERBUS_NATS_USER": "\udcff", "INFERBUS_NATS_PASSWORD": "p"}
    )


@pytest.mark.parametrize("url", ["nats://[", "nats://host:99999", "nats://host:port", "nats://"])
def test_a_url_that_cannot_be_parsed_is_a_problem_and_no_traceback(url: str) -> None:
    assert "must be a nats://" in told({"nats_url": (url,)})[0]


def test_a_url_with_a_query_is_refused_and_the_query_not_repeated() -> None:
    (problem,) = told({"nats_url": ("nats://host:4222/?password=hunter2",)})
    assert "without a query" in problem
    assert "hunter2" not in problem


def test_unknown_variables_are_named_with_what_was_probably_meant() -> None:
    env = {
        "INFERBUS_SLOT": "3",
        "INFERBUS_METRIC_PORT": "9464",
        "INFERBUS_XYZ": "",
        "INFERBUS_SLOTS": "3",
        "INFERBUS_CONFIG": "x",
        "OTHER": "",
    }
    assert unknown_variables(env) == [
        "unknown variable INFERBUS_METRIC_PORT; did you mean INFERBUS_METRICS_PORT?",
        "unknown variable INFERBUS_SLOT; did you mean INFERBUS_SLOTS?",
        "unknown variable INFERBUS_XYZ",
    ]


def test_what_kubernetes_sets_for_a_service_is_explained_where_it_hurts_and_else_ignored() -> None:
    env = {
        "INFERBUS_METRICS_PORT": "tcp://10.0.0.1:9464",
        "INFERBUS_METRICS_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "INFERBUS_METRICS_PORT_9464_TCP_ADDR": "10.0.0.1",
        "INFERBUS_METRICS_SERVICE_HOST": "10.0.0.1",
        "INFERBUS_METRICS_SERVICE_PORT_HTTP": "9464",
        "INFERBUS_PORT": "tcp://10.0.0.2:80",
    }
    assert unknown_variables(env) == []
    [problem] = told(env=env)
    assert (
        "worker.metrics_port (environment INFERBUS_METRICS_PORT): tcp://10.0.0.1:9464 was set by" in problem
    )
    assert "Kubernetes for the Service inferbus-metrics" in problem
    assert "enableServiceLinks: false" in problem


def test_secrets_are_shown_nowhere() -> None:
    secrets = {"nats_url": ("nats://joe:hunter2@host:4222", "nats://s3cret@host"), "nats_user": "u"}
    settings = resolve(secrets | {"nats_password": "hunter2"}, {})
    for text in (repr(settings), str(settings), repr(settings.bus), f"{settings.bus}"):
        assert "hunter2" not in text
        assert "s3cret" not in text
        assert "***" in text
        assert "host:4222" in text
    assert settings.bus.password == "hunter2"
    problems = told({"nats_url": ("http://joe:hunter2@host",), "nats_token": "s3cret", "nats_user": "u"})
    assert not any("hunter2" in problem or "s3cret" in problem for problem in problems)


def test_a_url_without_userinfo_is_shown_as_it_is() -> None:
    assert hide_userinfo("nats://host:4222") == "nats://host:4222"
    assert hide_userinfo("host") == "host"
    assert hide_userinfo("a:b@host") == "***@host"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        resolve({}, {}).worker.slots = 3  # type: ignore[misc]


def test_every_setting_has_one_flag_one_variable_and_a_help_text() -> None:
    every = options()
    assert all(isinstance(option, Option) and option.help.endswith((".", "batch:1.")) for option in every)
    for names in (
        [o.flag for o in every],
        [o.env for o in every],
        [o.name for o in every],
        [o.key for o in every],
    ):
        assert len(set(names)) == len(names)
    assert {o.section for o in options("bus")} == {"bus"}
    sections = (BusSettings, WorkerSettings, StreamSettings, GatewaySettings)
    fields = sum(len(msgspec.structs.fields(cls)) for cls in sections)
    assert len(every) == fields


@pytest.mark.parametrize("option", options(), ids=lambda option: option.flag)
def test_every_setting_can_be_given_in_each_way(option: Option, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    by_type = {bool: "true", int: "2", float: "2.5", str: "text", Path: str(tmp_path / "file")}
    text = {
        "nats_url": "nats://h:1",
        "reply_prefix": "a.",
        "classes": "batch:2",
        "live_share": "0.5",
        "gateway_listen": "127.0.0.1:1",
        "gateway_keys": "sk-0123456789abcdef:acme",
        "gateway_max_body": "2048",
        "gateway_max_file": "2048",
    }.get(option.name, by_type[option.type])
    if option.section == "streams" and option.type is int and option.name != "streams_replicas":
        text = str(2 * 1024 * 1024)
    more = {"nats_user": {"nats_password": "p"}, "nats_password": {"nats_user": "u"}}
    pairs = {"nats_tls_cert": {"nats_tls_key": text}, "nats_tls_key": {"nats_tls_cert": text}}
    others = more.get(option.name, {}) | pairs.get(option.name, {})
    by_flag = resolve({option.name: text} | others, {})
    by_env = resolve(others, {option.env: text})
    table, key = option.key.split(".")
    (tmp_path / "inferbus.toml").write_text(f'[{table}]\n{key} = "{text}"\n')
    by_file = resolve(others, {}, tmp_path / "inferbus.toml")
    found = [getattr(getattr(each, option.section), option.field) for each in (by_flag, by_env, by_file)]
    assert found[0] == found[1] == found[2]
    assert found[0] != getattr(getattr(Settings(), option.section), option.field)
