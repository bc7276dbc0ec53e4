"""Write the keys of the job file into docs/jobs.md, from the schema: `python docs/build_jobs.py`.

The text between the two markers is made; all else in the file is written by hand.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from drumline.jobs.spec import JobSpec, Python, Retry

PAGE = Path(__file__).with_name("jobs.md")
BEGIN = "<!-- keys: made by docs/build_jobs.py -->"
END = "<!-- end of keys -->"
_MAPS: dict[str, type[BaseModel]] = {"python": Python, "retry": Retry}


class _Yaml(yaml.SafeDumper):
    """YAML as one writes it by hand."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Yaml.add_representer(str, _text)


def _example(key: str, value: Any) -> str:
    written: str = yaml.dump(
        {key: value},
        Dumper=_Yaml,
        # Lists on one line, maps line by line.
        default_flow_style=None if isinstance(value, list) else False,
        sort_keys=False,
        width=1000,
    )
    return written.rstrip("\n")


def _examples(model: type[BaseModel], key: str) -> list[str]:
    # From the fields, since pydantic sorts the keys of examples in the JSON schema.
    return [_example(key, value) for value in model.model_fields[key].examples or ()]


def _table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    rows = ["", "| key | meaning | default | example |", "|---|---|---|---|"]
    for key, field in schema["properties"].items():
        default = "needed" if key in schema.get("required", ()) else "–"
        if field.get("default") is not None:
            default = f"`{field['default']}`"
        examples = " or ".join(f"`{example}`" for example in _examples(model, key))
        rows.append(f"| `{key}` | {field['description']} | {default} | {examples} |")
    return "\n".join(rows) + "\n"


def keys() -> str:
    """Every key of the job file with its meaning and examples, as Markdown."""
    schema = JobSpec.model_json_schema()
    sections = []
    for key, field in schema["properties"].items():
        title = f"### `{key}`" + (" (needed)" if key in schema["required"] else "")
        examples = "\n# or\n".join(_examples(JobSpec, key))
        inside = _table(_MAPS[key]) if key in _MAPS else ""
        text = f"{title}\n\n{field['description']}\n\n```yaml\n{examples}\n```\n{inside}"
        sections.append(text)
    return "\n".join(sections)


def build(page: str) -> str:
    """The page with its keys made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{keys()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(build(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
