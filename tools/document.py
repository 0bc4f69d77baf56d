"""Writes docs/configuration.md: one table of every key, from the dataclasses beside the parts.

``python -m gridtron.tools.document docs/configuration.md``; a test holds the file against it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gridtron.conf.files import ConfigFiles
from gridtron.conf.schema import all_options
from gridtron.conf.values import show

_HEAD = """\
# Configuration

Every key of the configuration, with its type, default and meaning. This page is generated from the dataclasses beside
the parts (`python -m gridtron.tools.document docs/configuration.md`); a test holds it against them.

`gridtron train SECTION.KEY=VALUE` sets a key. `gridtron train GROUP=FILE` takes a file of options: from a folder
given by `--config-dir FOLDER`, from `./conf/GROUP/` of the working directory, or from this package. Keys given by
hand go on top of files, and `experiment` goes on top of the other groups' files. `--cfg job` prints the result and
starts nothing.

An option that does not exist, or a value that does not fit, is refused before anything starts, all of them at once,
with the nearest that does.

Paths may hold spaces, commas, quotes and `=`; `~` is expanded, `$NAME` is not. In a sweep (`-m`) a comma outside
quotes separates two paths.

## Groups
"""

_FOOT = """
## Parts of your own

`model.build=my_package.models:build` names a function `(config, grid) -> nn.Module`; `config` is the model section.

`plugins=[my_module]` imports a module (the working directory is searched too) with a function `register(registry)`:

```python
def register(registry):
    registry.add("model", "my_model", MyModelConfig, build)   # build(config, grid)
```

What `build(config, grid)` returns, by kind:

| kind | returns |
| --- | --- |
| model | an `nn.Module`: `model(tokens, targets)` -> losses of the tokens (batch, sequence) (1) |
| data | a sample source (`len()`, `samples(indices)`), or a pair of them: for training and held out |
| optimizer | a function from parameter groups to a `torch.optim.Optimizer`; the dataclass has a field `lr` |
| lr_schedule | a function (step from 1, base_lr, total_steps) -> rate |
| callback | a `gridtron.core.training.protocols.Callback`, on every rank |
| logger | a `gridtron.core.training.protocols.Logger`, on rank 0 |

(1) With `grid.pipeline` above 1 it has an attribute `stages`, {stage: module} of those that lie on its pipeline rank:
the first is called with the tokens, each with what the one before gave, the last with the targets as well.

Kinds are model, data, optimizer, lr_schedule, callback and logger. `MyModelConfig` is a frozen dataclass with a
default for each field. `model=my_model model.width=64` then picks the part and sets its options. Callbacks and
loggers run once they are registered: `callbacks.NAME.KEY=VALUE` sets an option, `~callbacks.NAME` leaves one out. An
installed distribution offers plugins through the entry-point group `gridtron.plugins`.
"""


def render() -> str:
    """The page."""
    lines = [_HEAD]
    lines += ["| group | files |", "| --- | --- |"]
    for group, names in ConfigFiles().groups().items():
        lines.append(f"| {group} | {', '.join(names)} |")
    section = ""
    for key, entry in all_options().items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"## {section}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        bounds = _bounds(entry.metadata)
        meaning = entry.meaning + (f" ({bounds})" if bounds else "")
        lines.append(
            f"| `{key}` | {entry.type_name} | `{show(entry.default)}` | {meaning.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines) + "\n" + _FOOT


def _bounds(metadata: object) -> str:
    get = getattr(metadata, "get", lambda name: None)
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    return ", ".join(f"{word} {show(get(name))}" for name, word in words.items() if get(name) is not None)


def main(arguments: Sequence[str]) -> int:
    """Writes the page to the file given."""
    if len(arguments) != 1:
        print("usage: python -m gridtron.tools.document docs/configuration.md", file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
