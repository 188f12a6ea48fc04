"""Hostile chat templates: none reaches Python, none stalls or fills the coordinator."""

import builtins
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.render_process import RenderLimits
from stagemesh.errors import ConfigError

HI = [{"role": "user", "content": "Hi"}]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('PATH', 'w') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['__builtins__'].open('PATH', 'w') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=messages) }}",
    "{{ namespace({'__init__': 1}) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('{0.__cla' ~ 'ss__}').format_map({'0': ''}) }}",
    "{{ messages.append(1) }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__init__ }}",
    "{{ dict.__globals__ }}",
    "{{ lipsum.__globals__.os.popen('touch PATH').read() }}",
]

# Each would take minutes or gigabytes. The second value says which wall stops it.
GREEDY = [
    ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "."),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ 'a' * 10**10 }}", "MemoryError"),
    ("{{ '%99999999999d' % 1 }}", "."),
    ("{{ 'a'.center(10**10) }}", "MemoryError"),
    ("{{ 10 ** (10**9) > 1 }}", "processor time"),
    ("{{ 7 ** (7 ** 10) > 1 }}", "processor time"),
    (
        "{% set ns = namespace(x='a') %}"
        "{% for i in range(50) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "MemoryError|processor time",
    ),
    (
        "{% set ns = namespace(x=[1]) %}"
        "{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        ".",
    ),
    ("{{ [range(99999)|list] * 99999 | map('sum') | list }}", "."),
    ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "longer than"),
    ("{{ messages[0].content * 20000000 }}", "longer than"),
    ("{{ ('a'*30)|replace('', 'b'*999)|replace('', 'c'*99999)|length }}", "MemoryError"),
]


def make(source: str, **limits: float) -> ChatTemplate:
    bounds = RenderLimits(max_cpu_seconds=limits.pop("max_cpu_seconds", 0.2), **limits)  # type: ignore[arg-type]
    return ChatTemplate(source, bos_token=None, eos_token=None, limits=bounds)


@pytest.fixture(scope="module")
def benign() -> Iterator[ChatTemplate]:
    """Another model's template, which must go on being served."""
    template = make("{{ messages[0].content }}")
    yield template
    template.close()


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_to_python(tmp_path: Path, source: str) -> None:
    target = tmp_path / "pwned"
    template = make(source.replace("PATH", str(target)))
    try:
        text = template.render(HI)
    except ConfigError as error:
        assert "chat template failed" in str(error)  # noqa: PT017 - some render as nothing instead
    else:
        # An unsafe attribute on its own is undefined, which renders as an empty text.
        assert text == ""
    finally:
        template.close()
    assert not target.exists()


def test_python_would_have_created_the_file(tmp_path: Path) -> None:
    """Control: what the templates above try works outside the sandbox."""
    target = tmp_path / "pwned"
    make.__globals__["__builtins__"]["open"](str(target), "w").close()
    assert target.exists()
    assert builtins.open is make.__globals__["__builtins__"]["open"]


@pytest.mark.parametrize(("source", "wall"), GREEDY)
def test_greedy_templates_are_cut(benign: ChatTemplate, source: str, wall: str) -> None:
    template = make(source)
    assert benign.render(HI) == "Hi"
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=wall):
        template.render(HI)
    assert time.perf_counter() - started < 10.0
    assert benign.render(HI) == "Hi"
    template.close()


def test_the_coordinator_itself_stays_small() -> None:
    template = make("{{ 'a' * (2 * 10**8) }}")
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConfigError, match="longer than"):
        template.render(HI)
    assert psutil.Process().memory_info().rss - before < 32 * 2**20
    template.close()


def test_renderer_can_open_no_file() -> None:
    """The second wall, behind the sandbox: kernel limits on the child itself."""
    template = make("{{ messages[0].content }}")
    before = {child.pid for child in psutil.Process().children()}
    template.render(HI)
    (renderer,) = [child for child in psutil.Process().children() if child.pid not in before]
    assert renderer.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
    assert renderer.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert set(renderer.environ()) <= {"PYTHONPATH", "LC_CTYPE"}
    template.close()


def test_next_rendering_works_after_a_cut() -> None:
    source = "{% if messages|length > 1 %}{{ messages|length ** (7 ** 10) > 1 }}{% endif %}ok"
    template = make(source)
    assert template.render(HI) == "ok"
    with pytest.raises(ConfigError, match="processor time"):
        template.render(HI * 2)
    assert template.render(HI) == "ok"
    template.close()


def test_a_template_that_is_cut_again_and_again_is_given_up() -> None:
    template = make("{{ 7 ** (7 ** 10) > messages|length }}", max_kills=2, max_cpu_seconds=0.05)
    for _ in range(2):
        with pytest.raises(ConfigError, match="was stopped"):
            template.render(HI)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="not run any more"):
        template.render(HI)
    assert time.perf_counter() - started < 0.05


def test_faults_of_messages_do_not_count_as_cuts() -> None:
    template = make("{{ raise_exception('no') if messages|length > 1 else 'ok' }}", max_kills=1)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no"):
            template.render(HI * 2)
    assert template.render(HI) == "ok"
    template.close()


def test_silent_renderer_is_ended() -> None:
    template = make("{{ messages[0].content }}", max_wall_seconds=0.3)
    before = {child.pid for child in psutil.Process().children()}
    while True:  # a slow start may use up the short wait
        try:
            template.render(HI)
            break
        except ConfigError:
            template = make("{{ messages[0].content }}", max_wall_seconds=0.3)
    (renderer,) = [child for child in psutil.Process().children() if child.pid not in before]
    renderer.suspend()
    with pytest.raises(ConfigError, match=r"longer than 0\.3 s"):
        template.render(HI)
    assert not renderer.is_running()


@pytest.mark.parametrize("name", ["max_cpu_seconds", "max_wall_seconds", "max_memory_bytes"])
def test_limits_must_be_positive(name: str) -> None:
    for value in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match=name):
            RenderLimits(**{name: value})  # type: ignore[arg-type]
