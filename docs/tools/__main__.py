"""Writes the generated parts of README.md and docs/.

python -m docs.tools            # writes them
python -m docs.tools --check    # fails if one is out of date
"""

from __future__ import annotations

import sys

from docs.tools.documents import DOCUMENTS, ROOT, generated


def main(check: bool) -> int:
    """Writes or checks every document, and names those that differ."""
    differ = False
    for path in DOCUMENTS:
        old = path.read_text()
        new = generated(old)
        if new == old:
            continue
        differ = True
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'is written'}")
        if not check:
            path.write_text(new)
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
