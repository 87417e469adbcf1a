"""Label requests by the four areas of MMLU: `python -m benchmarks.mmlu_areas IN.json OUT.json`.

IN.json is what `moe-trace import --meta` takes; of its requests of MMLU the category, a subject, becomes the area that
Hendrycks et al. (2021) put it in, since of one subject `benchmarks.adaptation` has too few.
"""

import json
import sys
from pathlib import Path

AREAS = {
    "stem": """abstract_algebra anatomy astronomy college_biology college_chemistry college_computer_science
    college_mathematics college_physics computer_security conceptual_physics electrical_engineering
    elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
    high_school_mathematics high_school_physics high_school_statistics machine_learning""",
    "humanities": """formal_logic high_school_european_history high_school_us_history high_school_world_history
    international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory
    professional_law world_religions""",
    "social": """econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics
    high_school_microeconomics high_school_psychology human_sexuality professional_psychology public_relations
    security_studies sociology us_foreign_policy""",
}
OF = {subject: area for area, subjects in AREAS.items() for subject in subjects.split()}


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for request in told["requests"]:
        if request["dataset"] in ("mmlu_test", "mmlu_validation"):
            request["dataset"], request["category"] = "mmlu", OF.get(request["category"], "other")
    Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
