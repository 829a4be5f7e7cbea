"""Dialogues with known facts, of three kinds, and what is asked about them.

Each has four topics in two sessions, and five facts per topic, each with a name of its own.

* "repeated": a fact's question repeats its words. Every fact stands in a window of four turns of
  its own.
* "paraphrased": the question uses other words, and between facts are one to four turns, so that
  windows begin anywhere.
* "support": a customer and an assistant, in turns of two sentences about programs and machines,
  also asked about in other words.

The corrections of ``midfill.methods.episodes.clustering`` were chosen on the first kind alone.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NAMES = (
    "John", "Mary", "Paul", "Anna", "Peter", "Sarah", "David", "Laura", "James", "Emma", "Robert",
    "Alice", "George", "Helen", "Frank", "Julia", "Henry", "Maria", "Simon", "Rachel",
)  # fmt: skip
_CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Boston", "Chicago", "Dallas",
    "Denver", "Dublin", "Athens", "Sydney", "Tokyo", "Moscow", "Cairo", "Delhi", "Toronto",
    "Seattle", "Houston",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A question about a dialogue.

    Attributes:
        topic: of the fact.
        line: number of the line that tells it.
        question: what follows the dialogue, up to the answer.
        answer: with a space before it.
    """

    topic: str
    line: int
    question: str
    answer: str


@dataclass(frozen=True)
class Dialogue:
    """A dialogue, and what is asked about it.

    Attributes:
        lines: its turns.
        topics: of each line.
        asked: its twenty facts.
    """

    lines: tuple[str, ...]
    topics: tuple[str, ...]
    asked: tuple[Asked, ...]

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(f"{line}\n" for line in self.lines)


@dataclass(frozen=True)
class _Fact:
    """A fact.

    Attributes:
        told: with {} in the place of its name.
        asked: the question; the first kind has none.
    """

    told: str
    asked: str = ""


@dataclass(frozen=True)
class _Topic:
    facts: tuple[_Fact, ...]
    talk: tuple[str, ...]


def _topic(facts: Mapping[str, str], *talk: str) -> _Topic:
    return _Topic(tuple(_Fact(told, asked) for told, asked in facts.items()), talk)


_REPEATED = {
    "garden": _topic(
        {
            "the roses in the garden came from": "",
            "the gardener who prunes the hedge is called": "",
            "the compost for the flower beds is sold by": "",
            "the tulip bulbs were planted by": "",
            "the lawn in the garden is watered by": "",
        },
        "I dug up weeds between the flower beds all morning.",
        "The soil is dry and the roots need more water.",
        "We should trim the branches before the leaves fall.",
        "A hedgehog sleeps under the bushes by the fence.",
    ),
    "boat": _topic(
        {
            "the sailing boat in the harbour is called": "",
            "the captain of the ferry is called": "",
            "the island where we anchor the boat is": "",
            "the torn sails were mended by": "",
            "the lighthouse on the coast is called": "",
        },
        "The wind was strong and the waves came over the deck.",
        "We tied the ropes at the pier before the storm.",
        "The anchor got stuck among the rocks at low tide.",
        "Seagulls followed us all the way along the shore.",
    ),
    "kitchen": _topic(
        {
            "the soup recipe was written by": "",
            "the bakery with the fresh bread is called": "",
            "the cheese for the pasta is made by": "",
            "the chef of the restaurant is called": "",
            "the cake in the oven was baked by": "",
        },
        "I burned the onions in the pan again.",
        "The dough has to rest before you roll it out.",
        "Add some salt and pepper to the sauce.",
        "We ate dinner late and washed the dishes.",
    ),
    "office": _topic(
        {
            "the new manager of the office is called": "",
            "the software project is called": "",
            "the contract for the client was signed by": "",
            "the meeting about the budget was moved by": "",
            "the invoice from the printer was paid by": "",
        },
        "My desk is covered with reports and emails.",
        "The deadline for the spreadsheet is on Friday.",
        "Everyone stayed late to finish the slides.",
        "The team hired two engineers this month.",
    ),
}
_PARAPHRASED = {
    "health": _topic(
        {
            "A physiotherapist, {}, showed me stretches for my sore knee.":
                "Who treats the injury in your leg?",
            "The dentist who pulled my tooth is {}.":
                "Which person took care of your mouth?",
            "I got the prescription for my allergy from {}.":
                "Who wrote down pills against your sneezing?",
            "When I had the flu, {} drove me to the clinic.":
                "Who gave you a lift as you were ill?",
            "The nurse with the kind voice is {}.":
                "What is the name of the gentle hospital worker?",
        },
        "My back hurts whenever I sit for too long.",
        "I should sleep more and drink less coffee.",
        "The waiting room was full of coughing people.",
        "My blood pressure is better than last year.",
        "The bandage itches, but the wound is healing.",
        "They took an x-ray and found nothing broken.",
    ),
    "music": _topic(
        {
            "Our choir has a new conductor, {}.":
                "Who leads the singers now?",
            "The violin in the attic once belonged to {}.":
                "Whose old string instrument did you find?",
            "For the concert, {} will play the drums.":
                "Who keeps the rhythm on stage?",
            "I take piano lessons with {}.":
                "Who teaches you at the keyboard?",
            "The song on the radio was written by {}.":
                "Who composed that tune?",
        },
        "The rehearsal took three hours yesterday.",
        "My guitar is out of tune again.",
        "They played the second movement far too fast.",
        "The audience clapped until there was an encore.",
        "I can't get that melody out of my head.",
        "We need a bass player for our band.",
    ),
    "school": _topic(
        {
            "Our maths teacher this year is {}.":
                "Who explains fractions to the class?",
            "I share a desk with {}.":
                "Who sits next to you among the pupils?",
            "The history essay has to be handed in to {}.":
                "Who collects the homework on the Romans?",
            "The headmaster of the school is {}.":
                "Who is in charge of all classrooms?",
            "My best friend in the chemistry class is {}.":
                "Who do you mix acids with?",
        },
        "The exam was much harder than I expected.",
        "I forgot my textbook and my pencils at home.",
        "We learn about volcanoes in geography.",
        "The grades will be posted after the holidays.",
        "Half of the students missed the bus.",
        "The library closes before the last lesson.",
    ),
    "travel": _topic(
        {
            "The hotel by the beach was recommended by {}.":
                "Who told you where to stay at the sea?",
            "My passport was found by {}.":
                "Who picked up the document that you need at borders?",
            "On the train to the mountains I met {}.":
                "Who was in the railway carriage?",
            "Our guide through the old town was {}.":
                "Who showed you around the sights?",
            "The tickets for the flight were booked by {}.":
                "Who reserved the seats on the plane?",
        },
        "The suitcase was too heavy for the airline.",
        "It rained on the island the whole week.",
        "We got lost between the temples and the market.",
        "The ferry leaves at six in the morning.",
        "I sent you a postcard from the desert.",
        "The tent was wet, so we slept in the car.",
    ),
}  # fmt: skip
_SUPPORT = {
    "network": _topic(
        {
            "The router that keeps rebooting stands in {}.":
                "Where is the faulty gateway?",
            "Our fastest fibre line ends in {}.":
                "In which city do you have the best broadband?",
            "The VPN drops whenever someone dials in from {}.":
                "From where do remote colleagues lose the tunnel?",
            "We moved the firewall to {} last week.":
                "Where does the packet filter run now?",
            "The wireless access point with the weak signal is in {}.":
                "Which place has bad wifi?",
        },
        "Please check the cables and the switch. A ping shows lost packets.",
        "The latency is high in the evening. DNS answers only every second time.",
        "I changed the subnet mask. Now the address is not assigned any more.",
        "The technician measured the bandwidth. It was half of what we pay for.",
        "Have you restarted the modem? The lamp should be green.",
    ),
    "billing": _topic(
        {
            "The invoice with the wrong amount went to {}.":
                "Where did the incorrect bill arrive?",
            "Our bank account is held in {}.":
                "In which city does the money lie?",
            "The refund was sent to the branch in {}.":
                "Which office got its payment back?",
            "We pay the highest tax in {}.":
                "Where do the authorities take most?",
            "The accountant who signs the orders is in {}.":
                "Where does the bookkeeper work?",
        },
        "The card was charged twice. I want my money back.",
        "The discount is missing on the receipt. It should be ten percent.",
        "Your subscription renews in March. You can cancel it before.",
        "The currency was converted at a bad rate. The fee is not refundable.",
        "We never got a reminder. The payment is overdue now.",
    ),
    "database": _topic(
        {
            "The primary replica of the tables runs in {}.":
                "Where is the main copy of our rows?",
            "The backup of the customers' records is stored in {}.":
                "Where could we restore lost entries from?",
            "The slow query comes from the report in {}.":
                "Whose SQL takes so long?",
            "The corrupted index was found in {}.":
                "Where did a lookup structure break?",
            "The migration of the schema failed in {}.":
                "Where could columns not be altered?",
        },
        "The transaction was rolled back. There was a deadlock between two writers.",
        "Please run the vacuum. The table has grown to forty gigabytes.",
        "A join over three keys is expensive. You could cache the view.",
        "The disk was full, so inserts failed. We deleted old logs.",
        "Null values are not allowed there. Add a default first.",
    ),
    "printer": _topic(
        {
            "The laser printer with the paper jam is in {}.":
                "Where are sheets stuck?",
            "The ink cartridges are delivered from {}.":
                "Where does the colour supply come from?",
            "The scanner that makes blurred copies is in {}.":
                "Which place digitises pages badly?",
            "The labels for the boxes are printed in {}.":
                "Where are stickers made?",
            "The repair shop that cleans the rollers is in {}.":
                "Where is the machine fixed?",
        },
        "There are grey stripes on every page. The drum is worn out.",
        "The tray is empty. Please load thick paper.",
        "It prints on one side only. Duplex is off by default.",
        "The toner is low. A new one lasts for two thousand pages.",
        "The driver shows an error. Turn the device off and on.",
    ),
}  # fmt: skip


def _repeated(rng: random.Random, topic: _Topic, fact: _Fact, name: str) -> tuple[list[str], int]:
    chat = rng.sample(topic.talk, 2)
    lines = [f"Ann: {chat[0]}", f"Ben: By the way, {fact.told} {name}."]
    return [*lines, f"Ann: {chat[1]}", "Ben: I see."], 1


def _paraphrased(
    rng: random.Random, topic: _Topic, fact: _Fact, name: str
) -> tuple[list[str], int]:
    chat = rng.sample(topic.talk, rng.randint(1, 4))
    place = rng.randint(0, len(chat))
    said = [*chat[:place], fact.told.format(name), *chat[place:]]
    return [f"{rng.choice(('Mia', 'Leo'))}: {each}" for each in said], place


def _support(rng: random.Random, topic: _Topic, fact: _Fact, name: str) -> tuple[list[str], int]:
    chat = rng.sample(topic.talk, 3)
    told = f"{fact.told.format(name)} {chat[0]}"
    lines = [f"Customer: {told}", f"Assistant: {chat[1]}"]
    return [*lines, *[f"Customer: {chat[2]}"][: rng.randint(0, 1)]], 0


@dataclass(frozen=True)
class _Kind:
    """How dialogues of a kind are made.

    Attributes:
        topics: what they are about.
        names: what is asked for.
        tell: returns the lines that tell a fact, and the number of the line that does.
        question: what follows a dialogue, with the fact's words or its question in it.
    """

    topics: Mapping[str, _Topic]
    names: tuple[str, ...]
    tell: Callable[[random.Random, _Topic, _Fact, str], tuple[list[str], int]]
    question: str


KINDS = {
    "repeated": _Kind(
        _REPEATED, NAMES, _repeated, "Ann: What did you say about that?\nBen: By the way, {}"
    ),
    "paraphrased": _Kind(_PARAPHRASED, NAMES, _paraphrased, "Mia: {}\nLeo: That was"),
    "support": _Kind(_SUPPORT, _CITIES, _support, "Customer: {}\nAssistant: That is in"),
}


def draw_dialogue(kind: str, seed: int) -> Dialogue:
    """Return a dialogue of 20 facts.

    Args:
        kind: one of ``KINDS``.
        seed: of the order of topics and facts, of names, and of what is said between them.
    """
    made, rng = KINDS[kind], random.Random(seed)
    names = iter(rng.sample(made.names, len(made.names)))
    told = {name: rng.sample(topic.facts, len(topic.facts)) for name, topic in made.topics.items()}
    lines: list[str] = []
    topics: list[str] = []
    asked: list[Asked] = []
    for session in (slice(3), slice(3, None)):
        for topic in rng.sample(list(told), len(told)):
            for fact in told[topic][session]:
                name = next(names)
                said, place = made.tell(rng, made.topics[topic], fact, name)
                question = made.question.format(fact.asked or fact.told)
                asked.append(Asked(topic, len(lines) + place, question, f" {name}"))
                lines += said
                topics += [topic] * len(said)
    return Dialogue(tuple(lines), tuple(topics), tuple(asked))
