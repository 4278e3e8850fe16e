"""A reward of your own: called once a step with all its responses, returns one number for each."""


def opposite(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """1 for the right word alone, less the more words stand around it, 0 without it.

    Args:
        prompts: what the user said, one text a response.
        responses: what the model answered.
        rows: the row of data.jsonl that each prompt was made from, with the right answer as row["answer"].
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        words = [word.strip(".,!?\"'").lower() for word in response.split()]
        scores.append(1 / len(words) if row["answer"] in words else 0.0)
    return scores
