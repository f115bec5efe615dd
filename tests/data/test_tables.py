"""Tables are read right or refused in words, with the line: never from a wrong column.

NCL_FUZZED_TABLES=10000 makes so many tables that nobody has seen, instead of a thousand.
"""

import csv
import io
import json
import os
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncl_multi.data.tables import read_table

SENTENCES = ("A good mug for tea", "It broke after a week", "My sister liked it, too")


def write(folder, name, content, encoding="utf-8"):
    path = folder / name
    path.write_bytes(content.encode(encoding) if isinstance(content, str) else content)
    return path


# What users' files did


def test_reviews_are_read_from_the_column_review(tmp_path):
    rows = "".join(f'{i},mug,3,"{text}"\n' for i, text in enumerate(SENTENCES))
    table = read_table(write(tmp_path, "reviews.csv", f"review_id,product,rating,review\n{rows}"))
    assert table.columns == ("review",)
    assert table.rows == [(text,) for text in SENTENCES]
    assert table.unused == ("review_id", "product", "rating")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path, encoding):
    content = "text,id\nTee für zwei,1\n"
    table = read_table(write(tmp_path, "a.csv", content, encoding))
    assert table.columns == ("text",)
    assert table.rows == [("Tee für zwei",)]
    assert table.notices == ()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_the_delimiter_is_found_out(tmp_path, delimiter, ending):
    file = io.StringIO()
    lines = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    lines.writerows([["id", "text"], ["1", "one, two; three | four"], ["2", 'a "word" here']])
    table = read_table(write(tmp_path, f"a.{ending}", file.getvalue()))
    assert table.rows == [("one, two; three | four",), ('a "word" here',)]
    assert table.numbers == [2, 3]


def test_latin_1_is_read_with_a_notice(tmp_path):
    table = read_table(write(tmp_path, "a.csv", "text\nUn café crème\n", "latin-1"))
    assert table.rows == [("Un café crème",)]
    assert "read as Windows-1252" in table.describe()
    lines = "Un café crème\n" * 40 + "Un café\x12 crème\n"
    table = read_table(write(tmp_path, "a.csv", f"text\n{lines}", "latin-1"))
    assert table.rows[40] == ("Un café\x12 crème",)
    with pytest.raises(ValueError, match="not a text file: line 2 contains the byte 0x12"):
        read_table(write(tmp_path, "a.csv", "text\ncaf\xe9\x12\x13\n", "latin-1"))
    # 0x81 is a character in Latin-1 only.
    assert "Latin-1" in read_table(write(tmp_path, "a.csv", b"text\nx\x81y\n")).describe()


def test_utf_8_with_a_damaged_byte_is_refused_with_its_line(tmp_path):
    content = "text\nTee für zwei\nSüß und schön\n".encode() + b"b\xffd\n"
    with pytest.raises(ValueError, match="except for bytes on line 4"):
        read_table(write(tmp_path, "a.csv", content))


def test_json_lines_may_contain_the_line_separator_of_unicode(tmp_path):
    rows = [{"text": "one\u2028two"}, {"text": "three\u0085four"}]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    table = read_table(write(tmp_path, "a.jsonl", content))
    assert table.rows == [("one\u2028two",), ("three\u0085four",)]
    assert read_table(write(tmp_path, "a.txt", "one\u2028two\r\n\r\nthree\n")).numbers == [1, 3]


def test_a_cell_may_be_longer_than_csv_allows(tmp_path):
    limit = csv.field_size_limit()
    long = "word " * 40_000
    table = read_table(write(tmp_path, "a.csv", f"image,caption\n1.png,{long}\n"))
    assert table.rows == [(long.strip(),)]
    assert csv.field_size_limit() == limit
    assert len(table.describe()) < 300


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"mine.csv does not exist. Known names are snli"):
        read_table(tmp_path / "mine.csv", known=["snli"])
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_table(tmp_path)


# Columns


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("id,anchor,positive,negative", ("anchor", "positive", "negative")),
        ("negative,positive,anchor,text", ("anchor", "positive", "negative")),
        ("Anchor,Positive,score,x", ("Anchor", "Positive")),
        ("sentence1,sentence2,score,id", ("sentence1", "sentence2")),
        ("answer,question,id,title", ("question", "answer")),
        ("query,document,id,n", ("query", "document")),
        ("Review Text,id,notes,n", ("Review Text",)),
        ("title,body,id,n", ("body",)),
    ],
)
def test_columns_are_taken_by_name(tmp_path, header, taken):
    names = header.split(",")
    cells = {"id": "7", "score": "0.5", "n": "3", "x": "mug"}
    row = [cells.get(name, f"the words of {name}") for name in names]
    table = read_table(write(tmp_path, "a.csv", f"{header}\n{','.join(row)}\n"))
    assert table.columns == taken
    assert table.rows == [tuple(f"the words of {name}" for name in taken)]


NOT_TEXT = {
    "numbers": ["3", "4.5", "-1e3", "12 %"],
    "ids": ["A12-7", "b_9", "c0ffee", "0x1f"],
    "dates": ["2024-05-01", "1 March 2024", "2024-05-01T10:00:00Z", "Mon, 3 Jun 2024"],
    "links": ["https://a.org/b c".replace(" ", "_"), "www.b.org", "me@c.org", "http://d.org"],
    "file paths": ["a b/c d.png", "my cat.jpg", "/data/x", "C:\\my pictures\\1"],
    "categories": ["in progress", "not started", "in progress", "not started"],
    "single words": ["mug", "lamp", "cup", "table"],
}


@pytest.mark.parametrize("kind", NOT_TEXT)
def test_what_is_not_text_is_never_taken_for_it(tmp_path, kind):
    rows = "".join(f"{cell};these are the words\n" for cell in NOT_TEXT[kind])
    assert read_table(write(tmp_path, "a.csv", f"a;b\n{rows}")).columns == ("b",)
    lonely = "".join(f"{cell};1\n" for cell in NOT_TEXT[kind])
    path = write(tmp_path, "a.csv", f"a;b\n{lonely}")
    with pytest.raises(ValueError, match="no column contains text; choose with") as refused:
        read_table(path)
    assert f"  a: {NOT_TEXT[kind][0]!r} ({kind})\n  b: '1' (numbers)" in str(refused.value)


@pytest.mark.parametrize("name", ["text", "review", "anchor"])
def test_a_known_name_does_not_make_text_of_numbers(tmp_path, name):
    with pytest.raises(ValueError, match="no column contains text"):
        read_table(write(tmp_path, "a.csv", f"{name},n\n1,2\n3,4\n"))


def test_a_known_name_over_categories_does_not_win_over_a_column_of_text(tmp_path):
    states = ["in progress", "not started"]
    rows = "".join(f"{states[n % 2]},the words of row {n}\n" for n in range(6))
    for name in ("review", "title"):
        table = write(tmp_path, "a.csv", f"{name},x\n{rows}")
        if name == "title":
            assert read_table(table).columns == ("x",)
            continue
        with pytest.raises(ValueError, match="review contains categories, and there is text in x"):
            read_table(table)
    words = "".join(f"{word},the words of row {n}\n" for n, word in enumerate(("mug", "lamp") * 3))
    with pytest.raises(ValueError, match="text contains single words, and there is text in x"):
        read_table(write(tmp_path, "a.csv", f"text,x\n{words}"))
    lonely = write(tmp_path, "a.csv", "title,n\n" + "in progress,1\nnot started,2\n" * 3)
    with pytest.raises(ValueError, match="no column contains text"):
        read_table(lonely)


def test_pairs_of_which_one_is_an_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match="query, document do not all contain text"):
        read_table(write(tmp_path, "a.csv", "query,document\nwhat is tea,D001\nwho are you,D002\n"))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("plot,notes", "columns plot, notes contain text"),
        ("text,review", "text and review could be meant"),
        ("text,Text", "both 'text' and 'Text'"),
    ],
)
def test_two_columns_of_text_are_refused_with_an_example_of_each(tmp_path, header, complaint):
    path = write(tmp_path, "a.csv", f"{header}\nthe first words,the other words\n")
    with pytest.raises(ValueError, match=complaint) as refused:
        read_table(path)
    assert "'the first words' (text)" in str(refused.value)
    assert "'the other words' (text)" in str(refused.value)
    assert "--columns" in str(refused.value)
    chosen = header.split(",")[1]
    assert read_table(path, columns=[chosen]).rows == [("the other words",)]


def test_columns_that_are_asked_for_win_and_keep_their_order(tmp_path):
    path = write(tmp_path, "a.csv", "text,b,c\nthe words,2,x\n")
    assert read_table(path, columns=["c", "b"]).rows == [("x", "2")]
    with pytest.raises(ValueError, match=r"column 'd' of .* does not exist. Columns:\n  text:"):
        read_table(path, columns=["d"])
    with pytest.raises(ValueError, match="columns must differ"):
        read_table(path, columns=["b", "b"])
    with pytest.raises(ValueError, match="must be a list of names"):
        read_table(path, columns="text")
    assert read_table(write(tmp_path, "a.txt", "b,c\n1,x\n"), columns=["c"]).rows == [("x",)]


def test_text_without_spaces_between_words_is_text(tmp_path):
    rows = "1;我昨天买了一个杯子\n2;今天它坏了真可惜\n"
    assert read_table(write(tmp_path, "a.csv", f"a;b\n{rows}")).columns == ("b",)


# Rows


def test_rows_without_text_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, "a.csv", 'anchor,positive\na,b\n"",d\n\ne, \n"f\ng",h\n')
    table = read_table(path)
    assert table.rows == [("a", "b"), ("f\ng", "h")]
    assert table.numbers == [2, 6]
    assert table.left_out == (("anchor is empty", (3,)), ("positive is empty", (5,)))
    assert table.describe() == (
        f"{path}: 2 rows, columns anchor, positive\n"
        "  example, line 2: 'a' | 'b'\n"
        "  left out 1: anchor is empty (line 3)\n"
        "  left out 1: positive is empty (line 5)"
    )


def test_missing_values_of_json_and_parquet_are_left_out(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": "one two", "n": 1}, {"n": 2}, {"text": None, "n": 3}]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_table(path).left_out == (("text is missing", (2, 3)),)
    columns = {"text": ["one two", None], "n": [1, 2], "z": [[0.5], [1.0]]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.rows == [("one two",)]
    assert table.unused == ("n", "z")
    assert "left out 1: text is missing (row 2)" in table.describe()
    with pytest.raises(ValueError, match=r"'n' of .* contains int64, not text"):
        read_table(tmp_path / "a.parquet", columns=["n"])
    for name in ("n", "z"):
        parquet.write_table(pa.table({name: columns[name]}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match="no column contains text"):
            read_table(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="not a whole parquet file"):
        read_table(write(tmp_path, "b.parquet", b"PAR1 cut short"))


def test_a_table_of_the_hub_is_read_like_a_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"label": [0, 1], "review": ["one two", None]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    table = read_table(f"hf:{tmp_path}")
    assert table.columns == ("review",)
    assert table.rows == [("one two",)]
    assert table.unused == ("label",)
    assert table.left_out == (("review is missing", (2,)),)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "", "is empty: expected a line of column names"),
        ("a.csv", "text,n\n", "has no rows"),
        (
            "a.csv",
            "text\n \n''\n".replace("'", '"'),
            "no rows that can be used: text is empty in 2",
        ),
        ("a.csv", "id,text\n1,a\n2,b,c\n", r"line 3 has 3 cells where the first line has 2"),
        ("a.csv", "id,text\n1,a\n2\n", r"line 3 has 1 cells where the first line has 2"),
        ("a.csv", "text\nGood, really\n", r"line 2 has 2 cells where the first line has 1"),
        ("a.csv", 'id,text\n1,"a\n2,b\n', "line 2 has a quotation mark that does not fit"),
        ("a.csv", 'id,text\n1,"a" b\n', "line 2 has a quotation mark that does not fit"),
        ("a.csv", "a,text;b\n1,2;3\n", "can be split by commas or by semicolons"),
        (
            "a.csv",
            "text\na;1\nb;2\nc;3\n",
            "names one column, but all others contain semicolons",
        ),
        ("a.csv", "text,text\na,b\n", "two columns called 'text'"),
        ("a.csv", "text,n\na,1\ntext,n\n", "line 3 of .* repeats the column names"),
        ("a.csv", "1,A good mug\n2,A bad mug\n", "'1' looks like one of numbers"),
        ("a.csv", "good,A nice mug\ngood,A cup\n", "'good' is also a cell of its column"),
        ("a.csv", "x,I do like this mug\ny,A cup\n", "'I do like this mug' looks like text"),
        ("a.csv", b"text\nx\x00y\n", "not a text file: line 2"),
        ("a.csv", "text\nabc\n".encode("utf-16-le"), "not a text file: line 1"),
        ("a.jsonl", '{"text": "a b"}\n{"text"', "line 2 of .* is not JSON"),
        ("a.jsonl", '{"text": "a b"}\n\n["c d"]', "line 3 of .* must be an object"),
        ("a.jsonl", '{"text": "a b"}\n{"text": 5}', "line 2 of .*: text must be text; got '5'"),
        ("a.jsonl", '{"text": "a", "text": "b"}', "a name occurs twice"),
        ("a.jsonl", '{"text": "\\ud83d"}', "half a character"),
        ("a.jsonl", "[" * 100_000, "line 1 of .* is not JSON"),
        ("a.jsonl", '{"text": 1}\n{"text": 2}', "no column contains text"),
        ("a.txt", "\n \n", "has no rows"),
        ("a.doc", "x", "files must end in .csv, .tsv, .jsonl"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_line(tmp_path, name, content, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_table(write(tmp_path, name, content))


def test_the_line_of_excel_that_names_the_delimiter_is_no_row(tmp_path):
    table = read_table(write(tmp_path, "a.csv", "sep=;\r\nid;text\r\n1;a, b\r\n"))
    assert table.rows == [("a, b",)]
    assert table.numbers == [3]


def test_commas_in_every_cell_of_one_column_are_text(tmp_path):
    rows = "".join(f'"well, {word}"\n' for word in ("one", "two", "three", "four"))
    assert read_table(write(tmp_path, "a.csv", f"text\n{rows}")).rows[3] == ("well, four",)


def test_quotation_marks_in_files_with_tabs_need_no_partner(tmp_path):
    content = 'id\ttext\n1\t"Well, he said\n2\tA 5" pipe\n3\tand left"\n'
    table = read_table(write(tmp_path, "a.tsv", content))
    assert table.rows == [('"Well, he said',), ('A 5" pipe',), ('and left"',)]


# Tables that nobody has seen

WORDS = [
    "a", "the", "tea", "cup", "broke", "très", "schön", "Grüße", "and,", "or;", "but|", '"so"',
    "it's", '5"', "not;", "3", "\u4f60\u597d", "naïve", "-", "12", "(really)", "one\u2028two",
    "#1", "e.g.", "/", "x",
]  # fmt: skip
NAMES = {
    ("anchor", "positive"), ("anchor", "positive", "negative"), ("sentence1", "sentence2"),
    ("text",), ("Sentence",), ("review",), ("caption",), ("body",), ("question", "answer"),
    ("query", "document"),
}  # fmt: skip
OTHERS = {
    "n": lambda r: str(r.choice([r.randrange(10**6), round(r.random(), 3), -3])),
    "ref": lambda r: f"{r.choice('ABC')}{r.randrange(1000):03d}-{r.randrange(9)}",
    "day": lambda r: f"20{r.randrange(10, 30)}-0{r.randrange(1, 10)}-{r.randrange(10, 28)}",
    "url": lambda r: f"https://a.org/{r.randrange(999)}?q=a,b;c",
    "file": lambda r: f"my pictures/cat {r.randrange(999)}.png",
    "state": lambda r: r.choice(["in progress", "not started"]),
    "colour": lambda r: r.choice(["red", "blue", "green"]),
}


def sentence(r):
    """Three words at least that no other kind of column contains."""
    return " ".join(["cup", "of", *r.choices(WORDS, k=r.randrange(1, 7))])


def table_of(r, texts):
    """Names and rows of a table with these columns of text among others, in any order."""
    others = r.sample(sorted(OTHERS), r.randrange(0, 5))
    names = [*texts, *others]
    r.shuffle(names)
    count = r.randrange(5, 9)
    cells = {name: [OTHERS[name](r) for _ in range(count)] for name in others}
    cells |= {name: [sentence(r) for _ in range(count)] for name in texts}
    return names, [list(row) for row in zip(*(cells[name] for name in names), strict=True)]


def as_csv(r, names, rows):
    file = io.StringIO()
    writer = csv.writer(
        file,
        # Where there is one column, only commas tell that a cell needs quotation marks.
        delimiter=r.choice(",;\t|") if len(names) > 1 else ",",
        quoting=r.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
        lineterminator=r.choice(["\n", "\r\n"]),
    )
    writer.writerows([names, *rows])
    encoding = r.choice(["utf-8", "utf-8-sig", "utf-16", "cp1252"])
    text = file.getvalue()
    if encoding == "cp1252":
        text = text.replace("\u2028", " ").replace("\u4f60\u597d", "oui")
        for row in rows:
            row[:] = [c.replace("\u2028", " ").replace("\u4f60\u597d", "oui") for c in row]
    return text.encode(encoding)


def as_json_lines(r, names, rows):
    """Each line with its names in another order, as JSON allows."""
    shuffled = [r.sample(list(zip(names, row, strict=True)), len(names)) for row in rows]
    plain = r.choice([True, False])
    return "".join(json.dumps(dict(p), ensure_ascii=plain) + "\n" for p in shuffled).encode()


FUZZED = settings(
    max_examples=int(os.environ.get("NCL_FUZZED_TABLES", "1000")) // 4,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = st.integers(0, 2**40)


def wanted(names, rows, texts):
    """What a table says of its columns of text: its rows without those that lack one."""
    places = [names.index(name) for name in texts]
    rows = [tuple(row[place].strip() for place in places) for row in rows]
    return [row for row in rows if all(row)]


@FUZZED
@given(seed=SEEDS)
def test_columns_with_known_names_are_read_whatever_is_around_them(tmp_path, seed):
    r = random.Random(seed)
    texts = r.choice(sorted(NAMES))
    names, rows = table_of(r, texts)
    empty = r.sample(range(len(rows)), r.randrange(0, 3))
    for row in empty:
        rows[row][names.index(r.choice(texts))] = r.choice(["", " "])
    kind, content = r.choice([("csv", as_csv), ("tsv", as_csv), ("jsonl", as_json_lines)])
    path = write(tmp_path, f"a.{kind}", content(r, names, rows))
    table = read_table(path)
    assert table.columns == texts
    assert table.rows == wanted(names, rows, texts)
    assert sum(len(lines) for _, lines in table.left_out) == len(set(empty))


@FUZZED
@given(seed=SEEDS)
def test_the_only_column_of_text_is_found_whatever_its_name(tmp_path, seed):
    r = random.Random(seed)
    name = r.choice(["x", "Bemerkung", "what they said", "col 3", "Ünï"])
    names, rows = table_of(r, (name,))
    kind, content = r.choice([("csv", as_csv), ("jsonl", as_json_lines)])
    table = read_table(write(tmp_path, f"a.{kind}", content(r, names, rows)))
    assert table.columns == (name,)
    assert table.rows == wanted(names, rows, (name,))


@FUZZED
@given(seed=SEEDS)
def test_two_columns_of_text_without_known_names_are_always_refused(tmp_path, seed):
    r = random.Random(seed)
    texts = tuple(r.sample(["x", "Bemerkung", "plot", "notes", "said"], 2))
    names, rows = table_of(r, texts)
    kind, content = r.choice([("csv", as_csv), ("jsonl", as_json_lines)])
    path = write(tmp_path, f"a.{kind}", content(r, names, rows))
    with pytest.raises(ValueError, match=r"contain text; choose with --columns"):
        read_table(path)
    assert read_table(path, columns=texts).rows == wanted(names, rows, texts)


@FUZZED
@given(seed=SEEDS)
def test_a_table_with_damage_is_read_right_or_refused_in_words(tmp_path, seed):
    r = random.Random(seed)
    names, rows = table_of(r, ("review",))
    content = as_csv(r, names, rows)
    start, length = r.randrange(len(content)), r.randrange(1, 30)
    damage = r.choice([b"", bytes(r.randrange(256) for _ in range(r.randrange(1, 4))), b'"', b"\n"])
    damaged = content[:start] + damage + content[start + r.choice([0, length]) :]
    path = write(tmp_path, "a.csv", damaged)
    try:
        table = read_table(path)
    except ValueError as refused:
        if str(path) not in str(refused):
            raise
        return
    # Damage spoils the cells that it hits; every other row is one of the file's sentences.
    sentences = set(wanted(names, rows, ("review",)))
    assert len(table.columns) == 1
    assert sum(row not in sentences for row in table.rows) <= 2


# What a stranger's file may try


@pytest.mark.parametrize(
    "cell", ["a@" + "." * 100_000 + " x", "a" + "/" * 100_000 + "é", "1" + " " * 100_000 + "xxxx"]
)
def test_a_long_cell_takes_no_longer_than_its_length(tmp_path, cell):
    rows = "".join(json.dumps({"text": text, "c": cell}) + "\n" for text in SENTENCES)
    start = time.process_time()
    assert read_table(write(tmp_path, "a.jsonl", rows)).columns == ("text",)
    # The patterns alone would take minutes.
    assert time.process_time() - start < 2


def test_thousands_of_columns_are_refused(tmp_path):
    line = ",".join(f"c{i}" for i in range(4097))
    path = write(tmp_path, "a.csv", f"text{line}\nA good mug{',3' * 4096}\n")
    with pytest.raises(ValueError, match="at least 4097 columns; at most 4096 are read"):
        read_table(path)
    # Each line has another name: a table of them would have the square of the lines.
    rows = [{"text": "A good mug", f"n{i}": i} for i in range(5000)]
    few, many = ("".join(json.dumps(row) + "\n" for row in part) for part in (rows[:9], rows))
    assert read_table(write(tmp_path, "a.jsonl", few)).columns == ("text",)
    with pytest.raises(ValueError, match="at most 4096 are read"):
        read_table(write(tmp_path, "a.jsonl", many))
