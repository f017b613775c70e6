"""Print whether transformers ties a model's head to its embedding, by the defaults of its config class.

For a wrapper, such as one of text and images, that is the class of its language model's config.

`python auto_config.py FOLDER` prints JSON, without torch. Needs transformers.
"""

from __future__ import annotations

import json
import sys


def is_tied(folder: str) -> bool:
    """Return the answer for the checkpoint in `folder`. Raises whatever the config's class raises."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False))


def main(folder: str) -> int:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the script's folder, whose modules would shadow others
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds to load, and no config needs it
    try:
        print(json.dumps(is_tied(folder)))
    except Exception as error:  # a config's class may raise anything for damaged settings
        print(" ".join(str(error).split())[:300])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
