"""Talk to a running server with the `openai` package (pip install openai): `qsa serve` in one terminal, this in another."""

from __future__ import annotations

import argparse
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a question about a document, streamed.")
    parser.add_argument("question", nargs="?", default="Tell me about the sea in two sentences.")
    parser.add_argument("--document", help="text file that goes before the question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    content = args.question
    if args.document:
        with open(args.document, encoding="utf-8") as file:
            content = f"{file.read()}\n\n{args.question}"
    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    try:
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=256,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_progress": True},
        )
        for chunk in stream:
            progress = (chunk.model_extra or {}).get("prompt_progress")
            if progress:
                print(f"\rreading {progress['processed']} of {progress['total']} tokens", end="", file=sys.stderr, flush=True)
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                usage = chunk.usage
                share = (usage.model_extra or {}).get("qsa", {}).get("attended_share")
                print(f"\n{usage.prompt_tokens} + {usage.completion_tokens} tokens; attended {share}", file=sys.stderr)
    except openai.APIError as error:
        print(f"\nopenai_client: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
