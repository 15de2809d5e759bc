"""docs/http-api.md: its table is the list of routes, and what it says is refused is."""

from __future__ import annotations

import re

import pytest
from harness import ROOT

from node.http.chat_request import ChatFields, chat_ask
from node.http.errors import ApiError
from node.http.routes import ENDPOINTS

PAGE = (ROOT / "docs" / "http-api.md").read_text()


def test_the_table_of_routes_is_the_list_of_routes_and_says_who_may_call_them():
    told = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5:
            for method, path in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", cells[1]):
                told[method, path] = cells[2].replace("everybody", "public")
    assert told == {(one.method, one.path): one.access.value for one in ENDPOINTS}


REFUSED = (
    *("functions", "function_call", "web_search_options", "reasoning_effort", "role_mapping"),
    *("json_schema", "grammar", "adapters", "audio"),
)


@pytest.mark.parametrize("field", REFUSED)
def test_what_the_page_says_is_refused_is_refused(field):
    refused = PAGE[PAGE.index("**Refused**") : PAGE.index("**Ignored**")]
    assert f"`{field}`" in refused
    fields = ChatFields(messages=[{"role": "user", "content": "x"}])
    chat_ask(fields)
    setattr(fields, field, "something")
    with pytest.raises(ApiError) as caught:
        chat_ask(fields)
    assert caught.value.code == "unsupported_parameter"


def test_a_field_that_the_page_says_is_ignored_is_no_field_that_is_read():
    ignored = PAGE[PAGE.index("**Ignored**") :].split("\n\n")[0]
    names = set(re.findall(r"`(\w+)`", ignored))
    assert len(names) >= 8
    assert not names & set(ChatFields.__struct_fields__)
