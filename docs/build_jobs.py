"""Generate the keys section of docs/jobs.md from the schema: `python docs/build_jobs.py`.

Only the text between the two markers is generated.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from drumline.jobs.spec import JobSpec, Python, Retry

PAGE = Path(__file__).with_name("jobs.md")
BEGIN = "<!-- keys: made by docs/build_jobs.py -->"
END = "<!-- end of keys -->"
_MODELS: dict[str, type[BaseModel]] = {"python": Python, "retry": Retry}


class _Dumper(yaml.SafeDumper):
    """A dumper that writes text with line breaks as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)


def _example(key: str, value: Any) -> str:
    text: str = yaml.dump(
        {key: value},
        Dumper=_Dumper,
        # Lists on one line, maps line by line.
        default_flow_style=None if isinstance(value, list) else False,
        sort_keys=False,
        width=1000,
    )
    return text.rstrip("\n")


def _examples(model: type[BaseModel], key: str) -> list[str]:
    # From the fields, since pydantic sorts the keys of examples in the JSON schema.
    return [_example(key, value) for value in model.model_fields[key].examples or ()]


def _table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    rows = ["", "| key | meaning | default | example |", "|---|---|---|---|"]
    for key, field in schema["properties"].items():
        default = "required" if key in schema.get("required", ()) else "–"
        if field.get("default") is not None:
            default = f"`{field['default']}`"
        examples = " or ".join(f"`{example}`" for example in _examples(model, key))
        rows.append(f"| `{key}` | {field['description']} | {default} | {examples} |")
    return "\n".join(rows) + "\n"


def keys() -> str:
    """Return the description and examples of every key as Markdown."""
    schema = JobSpec.model_json_schema()
    sections = []
    for key, field in schema["properties"].items():
        title = f"### `{key}`" + (" (required)" if key in schema["required"] else "")
        examples = "\n# or\n".join(_examples(JobSpec, key))
        inner_keys = _table(_MODELS[key]) if key in _MODELS else ""
        text = f"{title}\n\n{field['description']}\n\n```yaml\n{examples}\n```\n{inner_keys}"
        sections.append(text)
    return "\n".join(sections)


def build(page: str) -> str:
    """Return the page with a new keys section."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{keys()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(build(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
