# SPDX-License-Identifier: AGPL-3.0-or-later
"""The modules of the chat page, each by itself in a real browser under the page's own policy."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from horde.oai.page import FILES
from horde.web.files import HEADERS, KINDS
from tests.clients._browser import Visit, Visits

ADDRESS = "http://127.0.0.1:9"  # nothing listens there: the files come from the folder

TEXTS = [
    (
        "# Title\n\nHello **bold** *it* ~~gone~~ `code`\nsecond line\n\n- a\n- b\n  - c\n\n"
        "1. one\n\n   more\n2. two\n\n> quote\nlazy\n\nSetext\n---\n\nend"
    ),
    (
        "| a | b |\n|---|:-:|\n| 1 | 2 |\n\n```python\ndef f():\n    return '`'\n```\nafter\n\n"
        "    indented\n"
    ),
    "~~~\ncode\n```\nstill\n~~~\ntext <b>x</b>\n\n<div>\n\n- [x] done\n- [ ] open\n\n***\n",
    (
        "maths \\(a_1 * b_2*c\\), $x_1*y*z$, costs $5 and $6.\n\n\\[\na = b\n- c\n"
        "= d\n\\]\n\n$$\n\\frac{1}{2}\n$$\n"
    ),
    "[early] and later\n\n- item\n- [early]\n\n[early]: https://example.org/there\n\nend\n",
    "```\nnever closed\n# no title\n\n\n| no | table |",
    "1. a\n2. b\n\n\n3. c\r\n\r\nשלום\r\n",
]


def serve_file(route: Route) -> None:
    """Answer with a file of the page, with the headers it has at the front."""
    path = route.request.url.removeprefix(ADDRESS)
    if path == "/blank":
        body = "<!doctype html><title>before</title>"
        route.fulfill(body=body, headers={**HEADERS, "content-type": KINDS[".html"]})
        return
    folder, name = FILES.get(path, (Path(), ""))
    if not name:
        route.fulfill(status=404, body="")
        return
    kind = KINDS[Path(name).suffix]
    route.fulfill(body=(folder / name).read_bytes(), headers={**HEADERS, "content-type": kind})


@pytest.fixture
def visit(visits: Visits) -> Visit:
    """A page of nothing that may import the modules."""
    return visits.open(f"{ADDRESS}/blank", route=serve_file)


@pytest.fixture
def page(visit: Visit) -> Page:
    """A page of nothing that may import the modules."""
    return visit.page


def run(page: Page, script: str, argument: Any = None) -> Any:
    """The value of a script that has the modules of the page by name."""
    names = ("markdown", "stream", "conversations", "images", "request", "front", "turns")
    imports = "".join(f"const {name} = await import('/{name}.js');" for name in names)
    return page.evaluate(f"async (input) => {{ {imports} {script} }}", argument)


def render(page: Page, text: str) -> str:
    """The markup of a text's elements."""
    script = """
      const box = document.createElement('div');
      box.append(markdown.renderMarkdown(input));
      return box.innerHTML;"""
    return str(run(page, script, text))


# --- Markdown


def test_markdown_becomes_headings_lists_tables_and_code(page: Page) -> None:
    shown = render(page, TEXTS[0])
    for piece in (
        '<h1 dir="auto">Title</h1>',
        "<strong>bold</strong>",
        "<em>it</em>",
        "<del>gone</del>",
        "<br>second line",
        "<blockquote",
    ):
        assert piece in shown
    shown = render(page, TEXTS[1])
    assert '<th dir="auto">a</th>' in shown
    assert "return '`'\n</code>" in shown
    assert ">python<button" in shown


def test_formulas_stay_as_they_were_written(page: Page) -> None:
    shown = render(page, TEXTS[3])
    for formula in (
        "\\(a_1 * b_2*c\\)",
        "$x_1*y*z$",
        "\\[\na = b\n- c\n= d\n\\]",
        "$$\n\\frac{1}{2}\n$$",
    ):
        assert f'class="formula">{formula}<' in shown
    assert "costs $5 and $6." in shown


HOSTILE = [
    "<script>document.title='broken in'</script>",
    "text <img src=x onerror=\"document.title='broken in'\"> text",
    "<svg><script>document.title='broken in'</script></svg>",
    "<svg onload=\"document.title='broken in'\">",
    "<iframe srcdoc=\"<script>parent.document.title='broken in'</script>\"></iframe>",
    "<style>body { background: url(https://evil.example/style) }</style>",
    '<div style="background: url(https://evil.example/div)">x</div>',
    (
        "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;<img src=1"
        " onerror=document.title=1>'>"
    ),
    "[click](javascript:document.title='broken%20in')",
    "[click](JaVaScRiPt:document.title=1) [click](&#106;avascript:document.title=1)",
    "[click](data:text/html,<script>parent.document.title=1</script>)",
    (
        "[click](vbscript:x) [click](file:///etc/passwd) [click](blob:x) [click](/v1/models)"
        " [click](#x)"
    ),
    "[click](<javascript:document.title=1>)\n\n[ref]\n\n[ref]: javascript:document.title=1",
    "<javascript:document.title=1> <https://evil.example/auto>",
    "![picture](https://evil.example/picture.png) ![svg](data:image/svg+xml;base64,PHN2Zy8+)",
    '![x" onerror="document.title=1](https://evil.example/x" onerror="document.title=1)',
    '![a][pic]\n\n[pic]: https://evil.example/reference.png "title" onload=x',
    '[a](https://evil.example/" onclick="document.title=1)',
    "```<img src=x onerror=document.title=1>\ncode\n```",
    '```"><script>document.title=1</script>\ncode\n```',
    "| <img src=x onerror=document.title=1> |\n|---|\n| <script>document.title=1</script> |",
    '<a href="javascript:document.title=1" id="composer" name="turns">x</a>',
    "<form action=https://evil.example><input name=attributes></form>",
    (
        "<base href=https://evil.example><meta http-equiv=refresh"
        " content='0;url=https://evil.example'>"
    ),
    (
        "<link rel=stylesheet href=https://evil.example/x.css><video src=https://evil.example/v"
        " poster=https://evil.example/p>"
    ),
    "\\(<img src=x onerror=document.title=1>\\) $<script>document.title=1</script>$",
]


def test_no_markup_of_a_reply_runs_loads_or_becomes_an_element(visit: Visit) -> None:
    page, script = (
        visit.page,
        "return input.map((text) => document.body.append(markdown.renderMarkdown(text)));",
    )
    run(page, script, HOSTILE)
    stream = (
        "for (const text of input) { const box = document.createElement('div');"
        " document.body.append(box);"
        " const streamed = new stream.StreamedMarkdown(box);"
        " for (let at = 0; at < text.length; at += 3) {"
        " streamed.append(text.slice(at, at + 3)); streamed.draw(); } streamed.finish(); }"
    )
    run(page, stream, HOSTILE)
    for link in page.locator("a").all():
        assert (link.get_attribute("href") or "").startswith("https://evil.example/")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    page.wait_for_timeout(200)
    assert page.title() == "before"
    unsafe = (
        "img, svg, script, iframe, style, form, input, base, meta, link, video, math,"
        " [id], [name], [onerror], [onclick], [style]"
    )
    assert page.locator("body").locator(unsafe).count() == 0
    assert not [address for address in visit.addresses if "evil" in address]


def test_a_link_tells_where_it_leads_unless_its_text_does(page: Page) -> None:
    shown = render(page, "[bank.example](https://evil.example/x)")
    assert '<span class="host">(evil.example)</span>' in shown
    for text in (
        "[https://bank.example](https://evil.example)",
        "[https://bank.example@evil.example/](https://bank.example@evil.example/)",
        "[bаnk.example](https://xn--bnk-6cd.example/)",
        "[https://bank.example/?evil.example](https://evil.example/)",
        "![https://bank.example](https://evil.example/x.png)",
    ):
        assert 'class="host">' in render(page, text), text
    assert 'class="host">' not in render(
        page, "https://example.org/a?b=c and <https://example.org>"
    )
    assert 'class="host">' not in render(page, "[example.org](https://example.org/deep/path)")


def test_what_is_nested_beyond_measure_is_shown_as_it_is(page: Page) -> None:
    for text in (
        ">" * 50_000,
        "- " * 50_000,
        "\n".join(f"{' ' * 2 * depth}- x" for depth in range(400)),
    ):
        shown = render(page, text)
        assert shown.count("<") == 2, "one paragraph"
    assert "<hr>" in render(page, "-" * 200)


PLANTED = "<img src=x onerror=\"document.title='broken in'\"><script>document.title=1</script>"


def serve_planted(route: Route) -> None:
    """The page before a front whose every word is markup."""
    path = route.request.url.removeprefix(ADDRESS)
    if path == "/page.json":
        route.fulfill(json={"title": PLANTED, "site": f"{ADDRESS}/"})
    elif path == "/v1/models":
        card = {
            "id": PLANTED,
            "context_length": 1,
            "architecture": {"input_modalities": [PLANTED]},
            "top_provider": {"max_completion_tokens": 1},
            "supported_parameters": [],
            "x_horde": {"workers": 1},
        }
        route.fulfill(json={"data": [card]})
    elif path == "/v1/chat/completions" and "fail" in str(route.request.post_data):
        error = {"message": PLANTED, "code": PLANTED, "metadata": {"request_id": PLANTED}}
        route.fulfill(status=502, json={"error": error}, headers={"Retry-After": PLANTED})
    elif path == "/v1/chat/completions":
        call = {"id": PLANTED, "function": {"name": PLANTED, "arguments": PLANTED}}
        deltas = [{"reasoning_content": PLANTED}, {"content": PLANTED}, {"tool_calls": [call]}]
        chunks: list[dict[str, Any]] = [
            {"model": PLANTED, "choices": [{"delta": delta}]} for delta in deltas
        ]
        horde = {"worker_name": PLANTED, "kudos": 1, "queue_wait_seconds": None}
        chunks.append({"choices": [{"delta": {}, "finish_reason": PLANTED}], "x_horde": horde})
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(body=f"{events}data: [DONE]\n\n", content_type="text/event-stream")
    else:
        serve_file(route)


def test_markup_in_names_facts_errors_and_files_is_text(visits: Visits, tmp_path: Path) -> None:
    visit = visits.open(f"{ADDRESS}/", route=serve_planted)
    page = visit.page
    expect(page.locator("#model")).to_have_value(PLANTED)
    for text in (PLANTED, "fail"):
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.wait_for_selector("#send", state="visible")
    expect(page.locator(".answered .facts").first).to_contain_text("<script>")
    expect(page.locator(".error p").first).to_have_text(PLANTED)
    file = tmp_path / "file.json"
    exchange = {"asked": {"text": PLANTED, "images": [PLANTED]}, "replies": [{"text": PLANTED}]}
    planted = {"id": "x", "title": PLANTED, "exchanges": [exchange]}
    file.write_text(json.dumps({"format": "horde-chat", "conversations": [planted]}))
    page.set_input_files("#import-file", file)
    expect(page.locator("#list-facts")).to_have_text("1 conversation imported.")
    page.locator("#list .open").last.click()
    expect(page.locator(".asked")).to_contain_text("<script>")
    assert page.title() == f"{PLANTED} chat"
    assert page.locator("body").locator("img, script").count() == 0


# --- a reply that grows


def test_a_reply_that_grows_ends_as_the_whole_is_shown(page: Page) -> None:
    script = """
      const differing = [];
      let seed = 7;
      const draw = (most) => { seed = (seed * 16807) % 2147483647; return 1 + (seed % most); };
      for (const text of input) for (let round = 0; round < 12; round += 1) {
        const box = document.createElement('div');
        const streamed = new stream.StreamedMarkdown(box);
        for (let at = 0; at < text.length; ) {
          const length = draw(round < 5 ? 2 : 20);
          streamed.append(text.slice(at, at + length));
          at += length;
          if (round % 4) streamed.draw();
        }
        streamed.finish();
        const whole = document.createElement('div');
        whole.append(markdown.renderMarkdown(text));
        if (!box.isEqualNode(whole)) differing.push([round, box.innerHTML, whole.innerHTML]);
      }
      return differing;"""
    assert run(page, script, TEXTS) == []


def test_what_is_read_again_of_a_reply_grows_with_it_and_no_faster(page: Page) -> None:
    script = """
      const kinds = {
        prose: 'Some **words** of a paragraph.\\nMore.\\n\\n', list: '- an item of a list\\n',
        words: 'word ',
        code: 'let line = 1;\\n',
      };
      const shares = {};
      for (const [name, piece] of Object.entries(kinds))
        shares[name] = [8_000, 20_000].map((length) => {
        const text = (name === 'code' ? '```js\\n' : '') + piece.repeat(length / piece.length);
        const streamed = new stream.StreamedMarkdown(document.createElement('div'));
        for (let at = 0; at < text.length; at += 50) {
          streamed.append(text.slice(at, at + 50));
          streamed.draw();
        }
        streamed.finish();
        return streamed.readCount / text.length;
      });
      return shares;"""
    for name, (short, long) in run(page, script).items():
        assert long < short * 1.5, name
        assert long < 60, name


def test_blocks_that_are_done_stay_the_same_elements(page: Page) -> None:
    script = """
      const box = document.createElement('div');
      const streamed = new stream.StreamedMarkdown(box);
      const write = (text) => { streamed.append(text); streamed.draw(); };
      write('# One\\n\\nFirst paragraph.\\n\\n```\\ncode\\n');
      const [title, paragraph, code] = box.children;
      write('more code\\n```\\n\\nSecond paragraph that ');
      const second = box.lastElementChild.firstChild;
      write('grows.\\n\\nThird.');
      streamed.finish();
      return [box.children[0] === title, box.children[1] === paragraph, box.children[2] === code,
        box.children[3].firstChild === second, second.data, box.children.length];"""
    assert run(page, script) == [True, True, True, True, "Second paragraph that grows.", 5]


# --- conversations


def keep(page: Page, script: str, argument: Any = None) -> Any:
    """The value of a script that has an empty store, and `make(id, text, updated)`."""
    begin = """
      localStorage.clear();
      const store = new conversations.ConversationStore();
      const make = (id, text, updated = 1) => ({id, title: '', updated,
        exchanges: [{asked: {text, images: []},
          replies: [{text: 'Re: ' + text, reasoning: '', model: 'm', facts: '', end: 'done',
            toolCalls: []}]}]});
    """
    return run(page, begin + script, argument)


def test_conversations_are_listed_by_age_found_by_words_and_deleted(page: Page) -> None:
    script = """
      store.put(make('a', 'Trees and birds', 1));
      store.put(make('b', 'BIRDS of prey', 3));
      store.put(make('c', 'Fish', 2));
      localStorage.setItem('of another page', 'x');
      const found = (words) => store.search(words).map(({id}) => id).join('');
      const seen = [found(''), found('birds'), found('re: fish'), found('birds trees'),
          found('none')];
      store.remove('b');
      const left = found('');
      store.clear();
      return [...seen, left, found(''), localStorage.getItem('of another page')];"""
    assert keep(page, script) == ["bca", "ba", "c", "a", "", "ca", "", "x"]


def test_broken_and_foreign_entries_harm_no_conversation(page: Page) -> None:
    script = """
      store.put(make('good', 'Good'));
      for (const [index, text] of input.entries())
        localStorage.setItem('horde-chat:conversation:' + index, text);
      const listed = store.list().map(({id}) => id);
      const broken = store.get('0');
      store.clear();
      return [listed.filter((id) => id === 'good').length, broken, listed.length,
          localStorage.length];"""
    entries = [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"x"',
        '{"id": "x"}',
        '{"id": 7, "exchanges": []}',
        '{"id": "../x", "exchanges": []}',
    ]
    odd = json.dumps(
        {
            "id": "odd",
            "updated": "later",
            "title": [],
            "exchanges": [
                None,
                {},
                {"asked": 1},
                {
                    "asked": {"text": 5, "images": ["https://evil.example/x"]},
                    "replies": [7, {"text": {}}],
                },
            ],
        }
    )
    assert keep(page, script, [*entries, odd]) == [1, None, 2, 0]
    read = "return conversations.readConversation(JSON.parse(input));"
    assert run(page, read, odd) == {
        "id": "odd",
        "title": "",
        "updated": 0,
        "exchanges": [
            {
                "asked": {"text": "", "images": []},
                "replies": [
                    {
                        "text": "",
                        "reasoning": "",
                        "model": "",
                        "facts": "",
                        "end": "done",
                        "toolCalls": [],
                    }
                ],
            }
        ],
    }


def test_the_oldest_conversations_make_room(page: Page) -> None:
    many = """
      for (let index = 0; index < 305; index += 1) store.put(make('c' + index, 'x', 1000 + index));
      const ids = store.list().map(({id}) => id);
      return [ids.length, ids[0], ids.at(-1)];"""
    assert keep(page, many) == [300, "c304", "c5"]
    large = """
      const text = 'x'.repeat(390_000);
      for (let index = 0; index < 8; index += 1) store.put(make('c' + index, text, 1000 + index));
      const stored = Object.keys(localStorage).length;
      const tooLarge = make('huge', 'Huge', 9999);
      tooLarge.exchanges = Array.from({length: 12}, () => make('x', text).exchanges[0]);
      return [stored, store.put(tooLarge), store.get('huge').id,
          Object.keys(localStorage).length];"""
    stored, is_kept, found, still_stored = keep(page, large)
    assert 1 < stored < 8
    assert (is_kept, found, still_stored) == (False, "huge", stored)


def test_a_browser_that_keeps_nothing_keeps_conversations_for_the_page(page: Page) -> None:
    script = """
      const refusing = {getItem: () => null, removeItem() {},
        setItem() { throw new Error('full'); }};
      return [null, refusing].map((storage) => {
        const loose = new conversations.ConversationStore(storage);
        return [loose.put(make('a', 'Kept')), loose.list().length, loose.get('a').id];
      });"""
    assert keep(page, script) == [[False, 1, "a"], [False, 1, "a"]]


def test_what_is_exported_can_be_imported_and_nothing_else(page: Page) -> None:
    script = """
      store.put(make('a', 'One')); store.put(make('b', 'Two'));
      const text = store.exportText();
      store.clear();
      const count = store.importText(text);
      const refused = input.map((wrong) => {
        try { store.importText(wrong); return wrong; } catch (error) { return error.name; } });
      return [count, store.list().map(({id}) => id).sort().join(''), [...new Set(refused)]];"""
    wrong = ["", "x", "[]", "null", "{}", '{"format": "other", "conversations": []}']
    assert keep(page, script, wrong) == [2, "ab", ["SyntaxError"]]


# --- what is sent


def test_only_what_was_answered_is_sent_with_what_is_asked(page: Page) -> None:
    script = """
      const reply = (text, end, toolCalls = []) => ({text, end, toolCalls});
      const ask = (text, ...replies) => ({asked: {text, images: []}, replies});
      const call = {id: 'c1', name: 'f', arguments: '{}', result: '21'};
      return request.buildMessages('System.', [
        ask('one', reply('1', 'done')), ask('failed', reply('half', 'failed')),
        ask('empty', reply('', 'done')),
        ask('cut', reply('a bit', 'stopped')), ask('tool', reply('', 'done', [call])), ], true);"""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert run(page, script) == [
        {"role": "system", "content": "System."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "cut"},
        {"role": "assistant", "content": "a bit"},
        {"role": "user", "content": "tool"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]


def test_a_model_without_eyes_is_told_of_an_image_in_words(page: Page) -> None:
    script = """
      const asked = [
        {asked: {text: 'What is it?', images: ['data:image/png;base64,AA']}, replies: []}];
      return [request.buildMessages('', asked, true), request.buildMessages('', asked, false)];"""
    seen, told = run(page, script)
    assert seen[0]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert told == [{"role": "user", "content": "What is it?\n[an image that you cannot see]"}]


def test_an_image_is_made_small_and_a_broken_one_refused(page: Page) -> None:
    script = """
      const canvas = Object.assign(document.createElement('canvas'), {width: 3000, height: 1500});
      canvas.getContext('2d').fillRect(0, 0, 10, 10);
      const file = await new Promise((resolve) => canvas.toBlob(resolve));
      const url = await images.readImage(file);
      const image = new Image(); image.src = url; await image.decode();
      const broken = await images.readImage(new Blob(['no image'])).catch(() => 'refused');
      return [url.slice(0, 23), image.width, image.height, broken, conversations.isImage(url),
        conversations.isImage('data:image/svg+xml;base64,AA'),
        conversations.isImage('https://evil.example/x.png')];"""
    assert run(page, script) == [
        "data:image/jpeg;base64,",
        1280,
        640,
        "refused",
        True,
        False,
        False,
    ]


def test_events_are_read_whatever_pieces_they_come_in(page: Page) -> None:
    script = """
      const text = ': keep-alive\\n\\n'
        + ': waiting {"queue_position": 3, "wait_time": 7, "kudos": 1.5}\\n\\n'
        + 'data: {"a": "é"}\\n\\n: waiting {broken\\n\\ndata: [DONE]\\n\\n';
      const bytes = new TextEncoder().encode(text);
      const seen = [];
      for (let size = 1; size < bytes.length; size += 3) {
        const body = new ReadableStream({start(controller) {
          for (let at = 0; at < bytes.length; at += size)
            controller.enqueue(bytes.slice(at, at + size));
          controller.close();
        }});
        const events = [];
        for await (const {data, comment} of front.readEvents(body))
          events.push(data || front.readWait(comment));
        seen.push(JSON.stringify(events));
      }
      return [...new Set(seen)].map(JSON.parse);"""
    wait = {"queue_position": 3, "wait_time": 7, "kudos": 1.5}
    assert run(page, script) == [[None, wait, '{"a": "é"}', None, "[DONE]"]]


# --- files


def test_the_files_of_others_are_their_packages_own(node: tuple[Path, Path]) -> None:
    vendored = Path(FILES["/vendor/marked.esm.js"][0]) / "vendor"
    modules = node[1] / "node_modules"
    for name, source in {
        "marked.esm.js": "marked/lib/marked.esm.js",
        "marked.LICENSE": "marked/LICENSE",
        "purify.min.js": "dompurify/dist/purify.min.js",
        "purify.LICENSE": "dompurify/LICENSE",
    }.items():
        assert (vendored / name).read_bytes() == (modules / source).read_bytes(), name


def test_all_files_of_the_page_are_under_300_kilobytes() -> None:
    assert sum((folder / name).stat().st_size for folder, name in FILES.values()) < 300_000
