"""Slow, obviously right versions for Knights and Knaves: solving, sameness of content, Logic-RL's reward."""

from __future__ import annotations

import re
from itertools import permutations, product


def truth(statement, assignment):
    """Value of one statement under one assignment (True = knight)."""
    operator, *parts = statement
    if operator == "telling-truth":
        return assignment[parts[0]]
    if operator == "lying":
        return not assignment[parts[0]]
    values = [truth(part, assignment) for part in parts]
    if operator == "not":
        return not values[0]
    if operator == "and":
        return all(values)
    if operator == "or":
        return any(values)
    if operator == "->":
        return not values[0] or values[1]
    if operator == "<=>":
        return values[0] == values[1]
    raise KeyError(operator)


def solutions(puzzle):
    """Every consistent assignment, as a set."""
    return {
        assignment
        for assignment in product([False, True], repeat=len(puzzle))
        if all(truth(statement, assignment) == assignment[i] for i, statement in enumerate(puzzle))
    }


def _form(statement, labels):
    """Statement as nested frozensets, so that order and repetition cannot matter where they should not."""
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return (operator, labels[parts[0]])
    forms = [_form(part, labels) for part in parts]
    if operator == "not":
        opposite = {"telling-truth": "lying", "lying": "telling-truth"}
        if forms[0][0] in opposite:
            return (opposite[forms[0][0]], forms[0][1])
        return forms[0][1] if forms[0][0] == "not" else ("not", forms[0])
    if operator == "->":
        return (operator, *forms)
    if operator == "<=>":
        return (operator, tuple(sorted(map(_text, forms))))
    return forms[0] if len(set(forms)) == 1 else (operator, frozenset(forms))


def _text(form):
    if isinstance(form, frozenset):
        return "{" + ",".join(sorted(map(_text, form))) + "}"
    return "(" + ",".join(map(_text, form)) + ")" if isinstance(form, tuple) else repr(form)


def contents(puzzle):
    """The puzzle's texts under every renaming of its people; two puzzles are the same if these sets are equal."""
    people = range(len(puzzle))
    return frozenset(
        tuple(_text(_form(puzzle[order.index(position)], order)) for position in people)
        for order in permutations(people)
    )


def logic_rl(text, names_to_roles):
    """Logic-RL's reward as its description reads, with plain regular expressions; total only."""
    tags = re.findall(r"</?(?:think|answer)>", text)
    if tags != ["<think>", "</think>", "<answer>", "</answer>"]:
        return -3.0
    answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL).group(1)
    if len(re.findall("knight|knave", answer, re.IGNORECASE)) != len(names_to_roles):
        return -1.0
    for name in names_to_roles:
        if not re.search(rf"\b{name}\b\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE):
            return -1.0
    for name, role in names_to_roles.items():
        said = re.search(rf"\b{name}\b\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE).group(1)
        if said.lower() != role:
            return -0.5
    return 3.0


# -- Search-R1's protocol played and judged step by step, slowly


def follows(text: str) -> bool:
    """Whether the text is (think search information)* think answer, written as one regular expression over whole blocks."""
    body = r"(?:(?!</?(?:think|search|information|answer)>).)*"
    block = {
        tag: rf"\s*<{tag}>{body}</{tag}>" for tag in ("think", "search", "information", "answer")
    }
    pattern = rf"(?:{block['think']}{block['search']}{block['information']})*{block['think']}{block['answer']}\s*"
    return re.fullmatch(pattern, text, re.DOTALL) is not None
