"""``gridtron checkpoint WORD key=value``: what a checkpoint holds, whether it is sound, how two differ, one file of it.

Exit 0; 1: damaged (verify), different (diff); 2: the request or the checkpoint was wrong and nothing was written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from gridtron.conf.names import nearest_choice
from gridtron.conf.refusal import Refusal
from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.tools.arguments import parse_arguments, print_refusal, read_options
from gridtron.tools.checkpoint.opening import first_lines, printable
from gridtron.tools.pages import CHECKPOINT_WORDS, print_checkpoint_words


def main(arguments: Sequence[str]) -> int:
    """Runs one word; 2 for a wrong request."""
    word = arguments[0] if arguments else None
    if word is None:
        print_checkpoint_words()
        return 2
    try:
        if word not in CHECKPOINT_WORDS:
            raise Refusal([f"checkpoint {printable(word)}: {_which(word)}"])
        parsed = parse_arguments(arguments[1:])
        if parsed.sweep or parsed.show or parsed.directories:
            raise Refusal([f"checkpoint {word} takes key=value only; leave -m, --cfg and --config-dir out"])
        module = importlib.import_module(CHECKPOINT_WORDS[word].module)
        options = read_options(f"checkpoint {word}", getattr(module, CHECKPOINT_WORDS[word].options), parsed.overrides)
        code: int = module.run(options)
        return code
    except (Refusal, CheckpointError) as error:
        return print_refusal(first_lines(error))
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL in it, which no call of the system takes.
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return print_refusal(Refusal([printable(reason)]))
    except MemoryError:
        return print_refusal(Refusal([f"checkpoint {printable(word)} needs more memory than there is"]))
    except KeyboardInterrupt:
        print("interrupted; nothing was left half-written", file=sys.stderr)
        return 130


def _which(word: str) -> str:
    if "=" in word:
        return (
            f"a word comes first: {', '.join(CHECKPOINT_WORDS)}; nearest: gridtron checkpoint inspect {printable(word)}"
        )
    return nearest_choice(word, CHECKPOINT_WORDS)
