"""The page's view of the program's own lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from memprof.reports.document.build import document_of
from memprof.reports.html.report import render_html

from memprof import analyze, load_snapshot
from memprof.cli.group import main
from tests.reports.html.browser import CHROMIUM, chromium, open_page, violations
from tests.synthetic import SnapshotBuilder, frame

CODE = "def step(x):\n    y = x * 2  # </code><script>alert(1)</script>\n    return y\n"


def saved(folder: Path, file: str, line: int = 2, sources: bool = True) -> Path:
    build = SnapshotBuilder()
    address = build.alloc(1 << 20, "step")
    for event in build.events:
        event["frames"] = [frame("step", file, line)]
    build.live[address]["frames"] = [frame("step", file, line)]
    path = folder / "run.pickle"
    extra = {"sources": [{"path": file, "text": CODE}]} if sources else {}
    build.save(path, extra)
    return path


def page_of(path: Path, redact: bool = False) -> str:
    return render_html(document_of(analyze(load_snapshot(path)), redact=redact))


def test_a_recorded_line_is_shown_with_its_bytes_and_an_anchor(tmp_path: Path) -> None:
    page = page_of(saved(tmp_path, "/job/train.py"))
    assert 'id="source-/job/train.py-2"' in page
    assert "y = x * 2  # &lt;/code&gt;&lt;script&gt;" in page
    assert "<b>1.00 MiB</b>" in page


def test_redacting_shows_no_code(tmp_path: Path) -> None:
    page = page_of(saved(tmp_path, "/job/train.py"), redact=True)
    assert "x * 2" not in page
    assert "Its source is not known" in page


def test_another_version_is_said_and_not_shown(tmp_path: Path) -> None:
    page = page_of(saved(tmp_path, "/job/train.py", line=9))
    assert "It has 4 lines, and a stack names line 9: it is another version." in page
    assert "x * 2" not in page


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in ("report", *words)])
    return result.exit_code, result.output


def test_sources_come_from_a_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, "/root/job/train.py", sources=False)
    (tmp_path / "train.py").write_text(CODE)
    page = tmp_path / "page.html"
    assert run(path, "--source", tmp_path, "-o", page)[0] == 0
    assert "y = x * 2" in page.read_text()


def test_a_folder_without_the_programs_files_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, "/root/job/train.py")
    (tmp_path / "empty").mkdir()
    code, words = run(path, "--source", tmp_path / "empty", "-o", tmp_path / "page.html")
    assert code == 2
    assert "none of the program's files lies below it (/root/job/train.py)" in words
    code, words = run(path, "--source", tmp_path)
    assert (code, "-o FILE.html" in words) == (2, True)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make browser")
def test_frames_show_their_code_and_a_link_opens_the_file(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(saved(tmp_path, "/job/train.py")), encoding="utf-8")
    with chromium() as browser, open_page(browser, path) as page:
        page.locator("#icicle .box[data-open]").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog pre .code").inner_text().strip() == CODE.splitlines()[1].strip()
        page.keyboard.press("Escape")
        page.locator("#source summary").click()
        assert not page.locator("#source table").is_visible()
        page.evaluate("location.hash = '#source-/job/train.py-2'")
        page.locator("tr.pointed").wait_for()
        assert page.locator("tr.pointed td.line").inner_text().strip() == CODE.splitlines()[1].strip()
        page.set_viewport_size({"width": 400, "height": 900})
        page.wait_for_function("document.documentElement.scrollWidth <= 400")  # charts are resized after a moment
        assert violations(page) == []
        assert page.problems == []
