"""Load a tokenizer.json and split texts with it, in a separate process.

`python probe.py tokenizer.json`: exit code 0 where it works. Else the last line of stdout says why, or the process is
killed by the caller: a file can contain regular expressions that run for hours, sizes that fill the memory, and values
that make the library's native code panic, which Python code cannot stop.
"""

from __future__ import annotations

import itertools
import resource
import string
import sys

# Address space. The largest tokenizer that is published takes 1 GB while it is loaded.
MEMORY_BYTES = 4 << 30
# Characters of each text: enough for nested repetitions to explode, and no longer than a line of a prompt.
LENGTH = 256
_UNITS = ("a", "Z", "7", " ", "\n", "\t", ".", "_", "é", "日", "ab ", "a1", "A a.", "\u0301", " \n")
# An expression backtracks when the text continues with something it does not match, after something it requires.
_ENDS = ("", "\n", f"!{string.printable}日")


def main(path: str) -> int:
    """Load the tokenizer at `path`, encode and decode texts; return the exit code."""
    import tokenizers

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        print(f"no tokenizer: {' '.join(str(error).split())}")
        return 1
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for unit, end in itertools.product(_UNITS, _ENDS):
        text = unit * (LENGTH // len(unit)) + end
        try:
            tokenizer.decode(tokenizer.encode(text).ids)
        except Exception:
            pass  # a text that its vocabulary cannot spell is no fault of the file
        except BaseException as error:  # a panic of native code, which has no public name
            print(f"a tokenizer that fails on {text[:8] + '...'!r}: {' '.join(str(error).split())}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
