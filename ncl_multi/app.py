"""Search a run by hand: type words or drop a picture, see what matches and why, drop concepts.

The page is for the person at this machine: it listens on loopback by default, answers
only requests for its own host name, and accepts pictures only as uploads.

Usage:
    python -m ncl_multi.app runs/clip_ncl --port 7860
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.atlas.page import head_features
from ncl_multi.codes.explain import Match, explain, steer, unit_csr
from ncl_multi.codes.features import Features
from ncl_multi.codes.names import class_names, name_sides
from ncl_multi.codes.search import SparseIndex
from ncl_multi.files import DAMAGE, read_picture
from ncl_multi.model import SparseModel, load
from ncl_multi.optional import needs
from ncl_multi.settings import nested_values

EVERYTHING = "everything"
LOOPBACK = ("127.0.0.1", "localhost")
MOST_UPLOAD = 20 * 2**20
"""Bytes of a picture that is dropped on the page."""
MOST_SIDE = 2048
"""Width and height of a picture for the model; a larger one is scaled down, as it takes memory."""
MOST_TEXT = 10_000
"""Characters of a query."""
# What gradio can do and the page does not need: fetch an address, call ffmpeg, edit its own code.
_UNUSED = re.compile(
    r"([^=]*/gradio_api)?/(proxy=|file[=/]\s*[\w+.-]{2,}:|process_recording|run-history|stream/|vibe|dev/"
    r"|component_server|monitoring)"
)


@dataclass(frozen=True)
class Item:
    """What the app shows of one item."""

    text: str
    side: str
    split: str
    picture: bytes | None


class Desk:
    """A run that can be searched: its items, their index, the names, the model if it has one.

    The run must have non-negative codes; those of a twin cannot be explained.
    """

    def __init__(self, run: str | Path):
        run = Path(run)
        sides = list(head_features(run / "features").values())
        self.names = name_sides(sides)
        self.items = [item for side in sides for item in _items(side)]
        self.sides = list(dict.fromkeys(item.side for item in self.items))
        self.index = SparseIndex(sides[0].dims, self.names)
        for side in sides:
            self.index.add(np.arange(len(side)) + len(self.index), side.z)
        self.model = load_model(run / "model") if (run / "model").is_dir() else None
        self.title = run.resolve().name

    def code(self, text: str = "", image: Any = None, item: int | None = None) -> csr_array:
        """The code of a query: an image, else a text, else an item by its number."""
        # Last, because the browser sends 0 for the number that nobody typed.
        if image is None and not text.strip() and item is not None:
            if not 0 <= item < len(self.items):
                raise ValueError(f"items are numbered 0..{len(self.items) - 1}; got {item}")
            return self.index.codes([item])
        if image is None and not text.strip():
            raise ValueError("type words, drop a picture, or give the number of an item")
        if len(text) > MOST_TEXT:
            raise ValueError(f"type at most {MOST_TEXT} characters; got {len(text)}")
        if self.model is None:
            raise ValueError("this run has no model that can encode; give the number of an item")
        if image is None and not takes_words(self.model):
            raise ValueError("the model of this run encodes pictures, not words; drop a picture")
        return unit_csr(self.model.encode([text if image is None else image]))

    def concepts(self, code: csr_array, most: int = 12) -> list[int]:
        """The dimensions with the largest entries of a code."""
        order = np.argsort(-code.data, kind="stable")[:most]
        return code.indices[order].tolist()

    def label(self, dim: int) -> str:
        """A concept as the lists of the page show it."""
        return f"#{dim} {self.names[dim]}".strip()

    def find(
        self,
        code: csr_array,
        *,
        drop: Sequence[int] = (),
        boost: Mapping[int | str, float] | None = None,
        side: str = EVERYTHING,
        k: int = 12,
    ) -> list[Match]:
        """The best items for a code, without some concepts and with more of others."""
        query = steer(code, drop=drop, boost=boost)
        if not query.nnz:
            raise ValueError("the query is empty: keep at least one concept")
        within = None
        if side != EVERYTHING:
            within = [number for number, item in enumerate(self.items) if item.side == side]
        ids, scores = self.index.search(query, k, within=within)
        hit_ids = ids[0][ids[0] >= 0]
        codes = self.index.codes(hit_ids)
        return [
            Match(int(item), float(score), explain(query, codes[[row]], self.names))
            for row, (item, score) in enumerate(zip(hit_ids, scores[0], strict=False))
        ]

    def page(self, matches: Sequence[Match]) -> str:
        """Matches as HTML, each with its reasons; all text is escaped."""
        if not matches:
            return "<p>No item shares a concept with this.</p>"
        return "".join(self._result(match) for match in matches)

    def _result(self, match: Match) -> str:
        item = self.items[match.id]
        picture = ""
        if item.picture:
            picture = _thumbnail(item.picture)
        largest = [part for part in match.parts[:5] if part.share >= 0.005]
        reasons = " + ".join(
            f"<b>{part.share:.2f}</b>&nbsp;{html.escape(part.name)}" for part in largest
        )
        remainder = match.score - sum(part.share for part in largest)
        others = f" + <b>{remainder:.2f}</b>&nbsp;others" if remainder >= 0.005 else ""
        about = html.escape(f"item {match.id}{f', {item.split}' * bool(item.split)}")
        return (
            f'<div style="display:flex;gap:14px;align-items:center;margin:10px 0">{picture}'
            f"<div><div><b>{match.score:.2f}</b> {html.escape(item.text)} "
            f'<span style="opacity:.6">({about})</span></div>'
            f'<div style="opacity:.85;font-size:.9em">= {reasons}{others}</div></div></div>'
        )


def load_model(folder: Path) -> Any:
    """The model of a run; None if it cannot encode new queries: graphs, embeddings."""
    model = load(folder)
    return model if isinstance(model, SparseModel) and model.kind != "graph" else None


def takes_words(model: SparseModel) -> bool:
    """Whether a string is words to a model; to one of pictures it is a path of this machine."""
    encoder = getattr(model, "encoder", None)
    return model.kind == "clip" or getattr(encoder, "tower", "image") == "text"


def read_upload(path: Path) -> Any:
    """An uploaded picture in RGB, on white, upright and not larger than models need."""
    from PIL import ImageOps

    from ncl_multi.data.folders import on_white

    if path.stat().st_size > MOST_UPLOAD:
        raise ValueError(f"pictures may have at most {MOST_UPLOAD} bytes")
    picture = read_picture(path, "the upload")
    picture.thumbnail((MOST_SIDE, MOST_SIDE))
    return on_white(ImageOps.exif_transpose(picture))


def build(desk: Desk) -> Any:
    """The app, ready to launch."""
    with needs("ncl-multi[app]"):
        import gradio as gr

    def numbers(labels: Sequence[str] | None) -> list[int]:
        return [int(label.split()[0].removeprefix("#")) for label in labels or ()]

    def answer(text, image, item, side, dropped, added, weight):
        try:
            code = desk.code(text or "", image, None if item is None else int(item))
            boost: dict[int | str, float] = dict.fromkeys(numbers(added), float(weight))
            return desk.page(desk.find(code, drop=numbers(dropped), boost=boost, side=side))
        except ValueError as error:
            raise gr.Error(str(error)) from error

    def ask(text, image, item, side):
        try:
            code = desk.code(text or "", image, None if item is None else int(item))
        except ValueError as error:
            raise gr.Error(str(error)) from error
        choices = [desk.label(dim) for dim in desk.concepts(code)]
        return gr.update(choices=choices, value=[]), answer(text, image, item, side, [], [], 0)

    named = [desk.label(dim) for dim, name in enumerate(desk.names) if name]
    with gr.Blocks(title=f"Search {desk.title}", analytics_enabled=False) as app:
        gr.Markdown(
            f"## Search {html.escape(desk.title)}\nSee why items match, with or without a concept."
        )
        with gr.Row():
            with gr.Column(scale=1):
                text = gr.Textbox(label="Words")
                image = gr.Image(label="Picture", type="pil", height=180)
                item = gr.Number(label="Or an item, by its number", precision=0, value=None)
                side = gr.Radio(
                    [EVERYTHING, *desk.sides],
                    value=EVERYTHING,
                    label="Search among",
                    visible=len(desk.sides) > 1,
                )
                button = gr.Button("Search", variant="primary")
            with gr.Column(scale=2):
                dropped = gr.CheckboxGroup([], label="Concepts of the query: tick to leave out")
                with gr.Row():
                    added = gr.Dropdown(named, multiselect=True, label="Concepts to add")
                    weight = gr.Slider(0.1, 1.0, 0.5, label="Weight of added concepts")
                results = gr.HTML()
        question, steering = [text, image, item, side], [dropped, added, weight]
        for event in (button.click, text.submit):
            event(ask, question, [dropped, results])
        for changed in (dropped.input, added.input, weight.input):
            changed(answer, [*question, *steering], results)
    _only_uploads(app, image)
    return app


def main(
    run: Path, /, port: int | None = None, host: str = "127.0.0.1", host_names: tuple[str, ...] = ()
) -> None:
    """Serve the app of a run.

    Args:
        run: Folder that a recipe wrote.
        port: Port to listen on; by default the first free one from 7860.
        host: Address to listen on. Any address but loopback opens the app to the network, without
            a password.
        host_names: Host names that browsers may ask for, besides localhost and `host`.
    """
    app = build(Desk(run))

    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # DNS rebinding: a page whose name points to loopback sends its own host name.
    allowed = list(dict.fromkeys([*LOOPBACK, host, *host_names]))
    app.launch(
        server_name=host,
        server_port=port,
        share=False,
        max_file_size=MOST_UPLOAD,
        app_kwargs={
            "middleware": [
                Middleware(TrustedHostMiddleware, allowed_hosts=allowed),
                Middleware(OnlyThisPage),
            ]
        },
    )


class OnlyThisPage:
    """Middleware that answers 404 to requests which the page does not send."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        from starlette.responses import PlainTextResponse

        closed = scope["type"] == "http" and _UNUSED.match(scope["path"])
        answer = PlainTextResponse("not a part of this page", 404) if closed else self.app
        await answer(scope, receive, send)


def cli() -> None:
    """`main` with the arguments of the command line."""
    import tyro

    from ncl_multi.log import show_messages

    show_messages()
    tyro.cli(main)


def _only_uploads(app: Any, component: Any) -> None:
    """Let a page with one picture component accept files only as uploads of a visitor.

    By default the component opens any path of this machine that a request names, and each input,
    also that of words, fetches any address that is given to it as a file.
    """
    import gradio as gr

    read_inputs = app.preprocess_data

    async def preprocess_data(event: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        files = [value for value in nested_values(inputs) if isinstance(value, dict)]
        if any("://" in str(file.get("path")) for file in files):
            raise gr.Error("pictures are taken only as uploads, not from an address")
        return await read_inputs(event, inputs, *given, **options)

    def preprocess(payload: Any) -> Any:
        if payload is None:
            return None
        uploads = Path(component.GRADIO_CACHE).resolve()
        path = Path(payload.path or "").resolve()
        if not path.is_relative_to(uploads) or not path.is_file():
            raise gr.Error("pictures are taken only as uploads")
        try:
            return read_upload(path)
        except DAMAGE as error:
            raise gr.Error(str(error)) from error

    app.preprocess_data = preprocess_data
    component.preprocess = preprocess


def _items(features: Features) -> list[Item]:
    side = str(features.about.get("side") or "item")
    texts = [f"{side} {row}" for row in range(len(features))]
    if features.items is not None:
        texts = [str(text) for text in features.items]
    elif features.about.get("classes") and features.y is not None and features.y.ndim == 1:
        texts = class_names(features)
    pictures: Sequence[bytes | None] = features.thumbnails or [None] * len(features)
    splits = features.split_of()
    rows = zip(texts, splits, pictures, strict=True)
    return [Item(text, side, split, picture) for text, split, picture in rows]


def _thumbnail(encoded: bytes) -> str:
    """A picture as HTML; for bytes that are not a picture, the error."""
    from PIL import Image

    try:
        kind = Image.MIME[read_picture(encoded, "the thumbnail").format]
    except ValueError as error:
        return f'<i style="width:72px">{html.escape(str(error))}</i>'
    data = base64.b64encode(encoded).decode()
    return (
        f'<img src="data:{kind};base64,{data}" alt="" '
        f'style="width:72px;height:72px;object-fit:cover;border-radius:8px">'
    )


if __name__ == "__main__":
    cli()
