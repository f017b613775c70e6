"""Whether transformers ties a model's head to its embedding, by the defaults of its config's class.

Of a wrapper, such as one of text and images, it is the class of its language model's config.

`python auto_config.py FOLDER` answers in JSON, without torch. Needs transformers.
"""

from __future__ import annotations

import json
import sys


def main(folder: str) -> int:
    """Answer for the checkpoint in `folder` on stdout; return the exit code."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this package's folder, whose modules have names of their own
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to load, and no config needs it
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except Exception as error:  # damaged settings fail anywhere in its class
        print(" ".join(str(error).split())[:300])
        return 1
    print(json.dumps(bool(getattr(config, "tie_word_embeddings", False))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
