"""Prompts of a wanted length in tokens without a tokenizer: common words, and a ratio learnt from the server."""

from dataclasses import dataclass
from random import Random

# Each is one token, after a space, in the byte-pair vocabularies of English-speaking models.
_TEXT = """
about above across action after again against age air all almost along already also always among amount another answer
any area around art ask away back bad base became because become been before began begin being believe below best
better between beyond big black blood blue board body book both box boy bring brought brown building built business
call came car care carry case cause center certain chance change child children church city class clear close cold
color come common community company complete condition control cost could country course court cover cut dark data day
days dead death decided deep development did different difficult direction doctor does done door down due during each
early earth east easy effect either else end energy enough entire even evening ever every example experience face fact
family far father federal feel feet felt few field figure final find fine fire firm first five floor follow food foot
force foreign form found four free friend front full further future game gave general girl give glass god gone good
government great green ground group growth had hair half hall hand hard has have head hear heard heart heat held help
her here high him himself history hold home hope horse hospital hot hour hours house how however human hundred husband
idea important increase industry inside interest issue job just keep kept kind knew know land language large last late
later law lay lead least led left length less let letter level life light like likely line list little living local
long longer look lost love low made main major make man many mark market matter may mean means meeting member mind
minutes miss modern moment money month moral morning most mother mouth move much music must name nation natural nature
near need never new next night nor north not nothing now number off office often old once one only open order other
others out outside over own page paper part particular party past pattern pay peace people per perhaps period person
picture piece place plan plant play point police policy poor position possible power present president press pressure
price private problem process program property provide public purpose put quality question quickly quite race rate
rather read real reason received recent record red religious report required research rest result return right river
road room run said same saw say school science sea second section see seem seen sense sent service set several shall
she short should show side simple since single size small social society some son soon sound south space special
spring square staff stage stand start state station step still stock stood stop story street strength strong student
study such summer support sure surface system table take talk tax tell ten test than that their them then there these
they thing third this those though thought three through time today together told too took top total toward town trade
training tree trouble true trying turn two type under understand united until upon use used value various very view
voice wait walk wall want war was watch water way week well went were west what when where which while white who whole
whose why wide wife will window wish with within without woman women word words work world would write year years yet
young
"""
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRatio:
    """`num_tokens` of a prompt = `overhead` (template, start token) + `tokens_per_word` x words."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> "TokenRatio":
        """From two prompts, each as (words, tokens). One that makes no sense gives the default."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        if not 0.5 <= slope <= 8:
            return cls()
        return cls(tokens_per_word=slope, overhead=max(0.0, few[1] - slope * few[0]))

    def num_words(self, num_tokens: int, *, with_overhead: bool = True) -> int:
        overhead = self.overhead if with_overhead else 0.0
        return max(1, round((num_tokens - overhead) / self.tokens_per_word))


def random_text(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))
