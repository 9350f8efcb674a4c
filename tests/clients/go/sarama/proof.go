package main

import (
	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
)

// token gives out what it was given; nobody's identity provider is asked.
type token string

func (t token) Token() (*sarama.AccessToken, error) {
	return &sarama.AccessToken{Token: string(t)}, nil
}

// proof is what sarama leaves to its users of SCRAM.
type proof struct {
	mechanism    string
	conversation *scram.ClientConversation
}

func (p *proof) Begin(user, password, authzID string) error {
	hash := scram.SHA512
	if p.mechanism == sarama.SASLTypeSCRAMSHA256 {
		hash = scram.SHA256
	}
	client, err := hash.NewClient(user, password, authzID)
	if err == nil {
		p.conversation = client.NewConversation()
	}
	return err
}

func (p *proof) Step(challenge string) (string, error) { return p.conversation.Step(challenge) }

func (p *proof) Done() bool { return p.conversation.Done() }
