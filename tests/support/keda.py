"""KEDA's nats-jetstream trigger and the arithmetic of scaling, after KEDA 2.20 and Kubernetes' own rules.

The trigger asks a server's monitoring port the same questions as KEDA's does
(`pkg/scalers/nats_jetstream_scaler.go`) and reads the answers the same way. `Autoscaler` decides as KEDA and
a HorizontalPodAutoscaler do together.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

TOLERANCE = 0.1
"""Of a HorizontalPodAutoscaler: what differs by less from the target changes nothing."""


Fetch = Callable[[str, str], dict[str, Any]]


class TriggerError(Exception):
    """The trigger has no value; KEDA then changes nothing."""


def fetched(address: str, path: str) -> dict[str, Any]:
    """The JSON that an address serves under a path."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


class Trigger:
    """One trigger of the type nats-jetstream.

    Args:
        metadata: As in a ScaledObject.
        fetch: Gives the JSON that a host and port serve under a path; stands for the cluster's network.

    Attributes:
        leader: The server that leads the consumer, once that is known.
        asked: Every host that was asked.
    """

    def __init__(self, metadata: Mapping[str, str], fetch: Fetch) -> None:
        self._account = metadata["account"]
        self._stream = metadata["stream"]
        self._consumer = metadata["consumer"]
        self._endpoint = metadata["natsServerMonitoringEndpoint"]
        self._fetch = fetch
        self._query = f"/jsz?acc={self._account}&consumers=true&config=true"
        self.leader_url: str | None = None
        self.leader: str | None = None
        self.asked: list[str] = []

    async def lag(self) -> int:
        """Messages that the consumer has to deliver, or that are not acknowledged.

        Raises:
            TriggerError: No server answers, or none has the consumer.
        """
        return await asyncio.to_thread(self._lag)

    def _lag(self) -> int:
        known = self.leader
        answer = self._get(self.leader_url or self._endpoint, self._query)
        consumer = self._find(answer)
        if consumer is None and known:
            self.leader, self.leader_url = None, None
        if consumer is not None:
            self.leader = consumer.get("cluster", {}).get("leader", "")
            if known and known == self.leader:
                return _lag_of(consumer)
        if answer.get("meta_cluster", {}).get("cluster_size", 0) > 1:
            # What a server says that does not lead the consumer may be out of date.
            consumer = self._ask_leader()
        if consumer is None:
            raise TriggerError(f"consumer {self._consumer!r} not found in stream {self._stream!r}")
        return _lag_of(consumer)

    def _ask_leader(self) -> dict[str, Any]:
        """The consumer as its leader has it, which is found by asking each server that the first one names.

        The chart's servers tell clients no addresses (`no_advertise`), so KEDA takes those of their routes.
        """
        for route in self._get(self._endpoint, "/varz")["cluster"]["urls"]:
            node = route.split(".")[0]
            host = f"{node}.{self._endpoint}"
            found = self._find(self._get(host, self._query))
            if found is not None and found.get("cluster", {}).get("leader") == node:
                self.leader, self.leader_url = node, host
                return found
        raise TriggerError(f"leader node not found for consumer {self._consumer!r}")

    def _find(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        for account in answer.get("account_details") or ():
            if account["name"] == self._account:
                for stream in account.get("stream_detail") or ():
                    if stream["name"] == self._stream:
                        for consumer in stream.get("consumer_detail") or ():
                            if consumer["name"] == self._consumer:
                                found: dict[str, Any] = consumer
                                return found
        return None

    def _get(self, host: str, path: str) -> dict[str, Any]:
        self.asked.append(host)
        try:
            return self._fetch(host, path)
        except OSError as error:
            raise TriggerError(f"{host} does not answer: {error}") from error


def _lag_of(consumer: dict[str, Any]) -> int:
    lag: int = consumer["num_pending"] + consumer["num_ack_pending"]
    return lag


def evaluated(formula: str, values: Mapping[str, float]) -> float:
    """A formula of scaling modifiers: +, *, max and the names of triggers."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
            case ast.Call(ast.Name("max"), arguments):
                return max(map(value, arguments))
            case ast.Name(name):
                return values[name]
            case ast.Constant(int(number)):
                return number
        raise ValueError(f"not in a formula: {ast.dump(node)}")

    return value(ast.parse(formula, mode="eval").body)


class Autoscaler:
    """Decides the number of replicas of one ScaledObject.

    KEDA itself scales between none and one, by whether the value is above zero, and for how long it has not
    been. From one on the HorizontalPodAutoscaler that it makes decides, every 15 s.

    Args:
        spec: Of the ScaledObject.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self._formula: str = spec["advanced"]["scalingModifiers"]["formula"]
        self._target = float(spec["advanced"]["scalingModifiers"]["target"])
        self._minimum: int = spec["minReplicaCount"]
        self._maximum: int = spec["maxReplicaCount"]
        self._cooldown: float = spec["cooldownPeriod"]
        self._window: float = behavior["scaleDown"]["stabilizationWindowSeconds"]
        self._up: dict[str, int] = behavior["scaleUp"]["policies"][0]
        self._down: dict[str, int] = behavior["scaleDown"]["policies"][0]
        self._active: float = -math.inf
        self._wanted: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self.replicas: int = self._minimum

    def decide(self, now: float, values: Mapping[str, float] | None) -> int:
        """The number of replicas from `now` on.

        Args:
            now: Seconds.
            values: Of the triggers; None where one of them failed.
        """
        if values is None:
            return self.replicas
        value = evaluated(self._formula, values)
        if value > 0:
            self._active = now
        before = self.replicas
        if before == 0:
            self.replicas = int(value > 0)
        elif value == 0 and self._minimum == 0 and now - self._active > self._cooldown:
            self.replicas = 0
            self._wanted.clear()
        else:
            self.replicas = self._limited(now, self._stabilised(now, self._desired(value)))
        if self.replicas != before:
            self._changes.append((now, self.replicas - before))
        return self.replicas

    def _desired(self, value: float) -> int:
        if abs(1 - value / (self._target * self.replicas)) <= TOLERANCE:
            return self.replicas
        return min(max(math.ceil(value / self._target), 1), self._maximum)

    def _stabilised(self, now: float, desired: int) -> int:
        """Down only to the highest number of the window; up at once."""
        self._wanted.append((now, desired))
        while self._wanted[0][0] < now - self._window:
            self._wanted.popleft()
        if desired > self.replicas:
            return desired
        return min(self.replicas, max(each for _, each in self._wanted))

    def _limited(self, now: float, desired: int) -> int:
        """By the policies: so many pods in so many seconds."""
        up = sum(max(change, 0) for at, change in self._changes if at > now - self._up["periodSeconds"])
        down = sum(max(-change, 0) for at, change in self._changes if at > now - self._down["periodSeconds"])
        if desired > self.replicas:
            return max(self.replicas, min(desired, self.replicas - up + self._up["value"]))
        return min(self.replicas, max(desired, self.replicas + down - self._down["value"]))
