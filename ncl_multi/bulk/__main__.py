"""`ncl-encode model input output`, or `python -m ncl_multi.bulk`: codes of a file or folder."""

import json
import sys

from ncl_multi.bulk.encode import encode_files
from ncl_multi.log import show_messages
from ncl_multi.optional import needs


def main() -> None:
    """Encode, and print the counts; rows that were refused are counted, not hidden."""
    show_messages()
    with needs("ncl-multi[bulk]"):
        import tyro
    try:
        counts = tyro.cli(
            encode_files, prog="ncl-encode", config=(tyro.conf.PositionalRequiredArgs,)
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(f"ncl-encode: {error}")
    print(json.dumps(counts))
    if not counts["rows"]:
        sys.exit("ncl-encode: none of the rows could be encoded; see rejects-*.jsonl")


if __name__ == "__main__":
    main()
