"""`python -m ncl_multi.atlas runs/clip_ncl` writes the page of a run; so does `ncl-atlas`."""

import tyro

from ncl_multi.atlas.page import write_atlas
from ncl_multi.log import show_messages


def main() -> None:
    """Write the page of a run and say where it is."""
    show_messages()
    print(tyro.cli(write_atlas, config=(tyro.conf.Positional,)))


if __name__ == "__main__":
    main()
