"""Templates that would not end, or take all memory."""

from __future__ import annotations

import threading
import time

import jinja2
import pytest

from engine_reference.tokenizer_hf.template import LARGEST, Sandbox, TemplateTimeoutError


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in xs %}{% for b in xs %}{% for c in xs %}{{ c }}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in xs recursive %}{{ loop(xs) if loop.depth < 9 }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    environment = Sandbox(seconds=0.2)
    template, began = environment.from_string(source), time.monotonic()
    with pytest.raises(TemplateTimeoutError, match=r"not done after 0\.2 s"):
        environment.render(template, {"xs": list(range(2000))})
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10 ** 9 }}", "{{ 10 ** 9 * [1] }}", "{{ 9 ** (9 ** 9) }}", "{{ (9 ** 9) * 'ab' }}"]
)
def test_no_value_without_end(source: str) -> None:
    with pytest.raises(jinja2.TemplateError, match="elements"):
        Sandbox().from_string(source).render()


def test_what_templates_do_with_loops_still_works() -> None:
    environment = Sandbox()
    source = (
        "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% else %}none{% endfor %}"
        "{% for k, v in d.items() %}{{ k }}={{ v }} {% endfor %}{% for x in missing %}{% else %}nothing{% endfor %}"
        "{{ '-' * 3 }}{{ 2 ** 3 * 1.5 }}{% for x in xs if x > 1 %}{{ x }}{{ loop.length }}{% endfor %}"
    )
    found = environment.render(environment.from_string(source), {"xs": [1, 2, 3], "d": {"a": 1}})
    assert found == "1/3,2/3,3/3.a=1 nothing---12.02232"
    assert len("x" * LARGEST) == LARGEST


def test_each_thread_has_its_own_time() -> None:
    environment, ended = Sandbox(seconds=0.5), []
    slow = environment.from_string("{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")

    def render() -> None:
        with pytest.raises(TemplateTimeoutError):
            environment.render(slow, {})
        ended.append(time.monotonic())

    thread = threading.Thread(target=render)
    thread.start()
    quick = environment.from_string("{% for a in range(9) %}{{ a }}{% endfor %}")
    while not ended:
        assert environment.render(quick, {}) == "012345678"
    thread.join()
